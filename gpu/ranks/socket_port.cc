#include "gpu/ranks/socket_port.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <sluice/error.h>
#include "gpu/ranks/socket_meeting.h"

namespace sluice {
namespace {

constexpr int kHostTag = INT_MAX;  // of the port's own messages
constexpr std::chrono::microseconds kPortPause{50};
constexpr std::chrono::seconds kByeTime{2};

enum class FrameKind : std::uint32_t {
  kAsk = 1,   // a receive of `size_bytes` has begun
  kData = 2,  // `size_bytes` follow, for a receive that has asked
  kBye = 3    // this rank ends its connection
};

struct Frame {
  FrameKind kind = FrameKind::kBye;
  std::int32_t tag = 0;
  std::uint64_t size_bytes = 0;
};

// A message under way in one direction.
struct Transfer {
  std::byte* data = nullptr;  // a send only reads it
  std::uint64_t size_bytes = 0;
  std::uint32_t number = 0;
};

struct Outgoing {
  Frame frame;
  Transfer send;
  std::uint64_t sent_bytes = 0;  // of the frame and the data
};

using TransfersByTag = std::map<int, std::deque<Transfer>>;

struct Peer {
  ProcessFd socket;
  bool has_said_bye = false;
  std::deque<Outgoing> out;
  TransfersByTag sends;                            // not asked for yet
  std::map<int, std::deque<std::uint64_t>> asked;  // sizes, before their sends have begun
  TransfersByTag receives;                         // that have asked
  // The frame and the data that are coming in.
  Frame frame;
  std::uint64_t frame_bytes = 0;
  std::optional<Transfer> incoming;
  std::uint64_t incoming_bytes = 0;
};

template <class T>
std::optional<T> take_first(std::map<int, std::deque<T>>& queues, int tag) {
  const auto queue = queues.find(tag);
  if (queue == queues.end()) return std::nullopt;
  const T first = queue->second.front();
  queue->second.pop_front();
  if (queue->second.empty()) queues.erase(queue);
  return first;
}

class SocketPort final : public MessagePort {
 public:
  SocketPort(std::uint32_t rank, std::vector<ProcessFd> sockets, std::vector<std::uint32_t> host)
      : rank_(rank), peers_(sockets.size()), host_(std::move(host)) {
    for (std::size_t i = 0; i < sockets.size(); ++i) {
      if (sockets[i])
        (void)::fcntl(sockets[i].get(), F_SETFL, ::fcntl(sockets[i].get(), F_GETFL) | O_NONBLOCK);
      peers_[i].socket = std::move(sockets[i]);
    }
  }

  // The system still sends what it has taken, although the socket is closed: nothing has come in
  // that was not read, since this rank waits for nothing.
  ~SocketPort() override {
    // After a failure, messages are left. Their memory may be gone, and a bye would be taken for
    // data.
    std::erase_if(peers_, [](const Peer& peer) { return !peer.socket || !peer.out.empty(); });
    for (Peer& peer : peers_) {
      peer.out.push_back({.frame = {.kind = FrameKind::kBye}, .send = {}});
      send_to(peer);
    }
    // The buffers may be full of what was sent last.
    const auto end = std::chrono::steady_clock::now() + kByeTime;
    const auto is_left = [](const Peer& peer) { return peer.socket && !peer.out.empty(); };
    while (std::ranges::any_of(peers_, is_left) && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(kPortPause);
      for (Peer& peer : peers_)
        if (is_left(peer)) send_to(peer);
    }
  }
  bool ends_with_others() const override { return false; }

  std::string version() const override { return "sockets"; }
  std::uint32_t rank() const override { return rank_; }
  std::uint32_t rank_count() const override { return static_cast<std::uint32_t>(peers_.size()); }
  int tag_max() const override { return kHostTag - 1; }

  std::uint32_t start_send(const std::byte* data, std::uint64_t size_bytes, std::uint32_t rank,
                           int tag) override {
    Peer& peer = peers_[rank];
    const Transfer send{const_cast<std::byte*>(data), size_bytes, free_number()};
    if (const auto asked = take_first(peer.asked, tag)) {
      answer(rank, tag, *asked, send);
    } else {
      peer.sends[tag].push_back(send);
    }
    return send.number;
  }

  std::uint32_t start_receive(std::byte* data, std::uint64_t size_bytes, std::uint32_t rank,
                              int tag) override {
    const Transfer receive{data, size_bytes, free_number()};
    peers_[rank].receives[tag].push_back(receive);
    peers_[rank].out.push_back(
        {.frame = {.kind = FrameKind::kAsk, .tag = tag, .size_bytes = size_bytes}, .send = {}});
    return receive.number;
  }

  void test(std::vector<std::uint32_t>& ended, std::string& failure) override {
    failure = failure_;
    if (!failure_.empty()) return;  // the memory of messages may be gone
    for (Peer& peer : peers_)
      if (peer.socket && !peer.out.empty()) send_to(peer);
    if (has_news()) {
      for (std::uint32_t rank = 0; rank < peers_.size(); ++rank)
        if (peers_[rank].socket) receive_from(rank);
    }
    for (std::uint32_t rank = 0; rank < peers_.size(); ++rank) {
      const Peer& peer = peers_[rank];
      const bool is_wanted =
          !peer.receives.empty() || !peer.sends.empty() || !peer.out.empty() || peer.incoming;
      if (rank != rank_ && !peer.socket && is_wanted)
        fail(
            fmt::format("rank {} has ended its connection, but rank {} waits for it", rank, rank_));
    }
    for (const std::uint32_t number : ended_) {
      free_.push_back(number);
      ended.push_back(number);
    }
    ended_.clear();
    failure = failure_;
  }

  std::vector<std::uint32_t> host_ranks() override { return host_; }

  bool broadcast_on_host(std::span<std::byte> data) override {
    const bool is_first = host_.front() == rank_;
    std::vector<std::uint32_t> numbers;
    for (const std::uint32_t other : host_) {
      if (other == rank_) continue;
      if (is_first)
        numbers.push_back(start_send(data.data(), data.size(), other, kHostTag));
      else if (other == host_.front())
        numbers.push_back(start_receive(data.data(), data.size(), other, kHostTag));
    }
    return await_ends(std::move(numbers));
  }

  // The first one collects the answers.
  bool agree_on_host(bool own) override {
    std::vector<std::byte> answers(host_.size(), std::byte{own});
    std::vector<std::uint32_t> numbers;
    const bool is_first = host_.front() == rank_;
    for (std::size_t i = 1; i < host_.size(); ++i) {
      if (is_first)
        numbers.push_back(start_receive(&answers[i], 1, host_[i], kHostTag));
      else if (host_[i] == rank_)
        numbers.push_back(start_send(&answers[i], 1, host_.front(), kHostTag));
    }
    bool all = await_ends(std::move(numbers));
    all = all && std::ranges::count(answers, std::byte{0}) == 0;
    std::byte result{all};
    return broadcast_on_host(std::span(&result, 1)) && result == std::byte{1};
  }

  // The launcher ends the other processes.
  [[noreturn]] void abort() override { std::_Exit(1); }

 private:
  std::uint32_t free_number() {
    if (free_.empty()) return numbers_++;
    const std::uint32_t number = free_.back();
    free_.pop_back();
    return number;
  }

  void fail(const std::string& failure) {
    if (failure_.empty()) failure_ = failure;
  }

  bool await_ends(std::vector<std::uint32_t> numbers) {
    std::vector<std::uint32_t> ended;
    std::string failure;
    while (true) {
      test(ended, failure);
      std::erase_if(numbers, [&](auto number) { return std::ranges::count(ended, number) != 0; });
      if (numbers.empty() || !failure.empty()) return numbers.empty();
      ended.clear();
      std::this_thread::sleep_for(kPortPause);
    }
  }

  // The other rank waits for the data of `send`.
  void answer(std::uint32_t rank, int tag, std::uint64_t asked_bytes, const Transfer& send) {
    if (asked_bytes != send.size_bytes)
      return fail(
          fmt::format("rank {} waits for {} B from rank {}, which sends {} B: the ranks "
                      "disagree about the sequence; start all with one config and model",
                      rank, asked_bytes, rank_, send.size_bytes));
    peers_[rank].out.push_back(
        {.frame = {.kind = FrameKind::kData, .tag = tag, .size_bytes = send.size_bytes},
         .send = send});
  }

  // Sends what the system takes.
  void send_to(Peer& peer) {
    while (!peer.out.empty()) {
      Outgoing& next = peer.out.front();
      const std::uint64_t data_begin = sizeof(Frame);
      const std::uint64_t total = data_begin + next.send.size_bytes;
      const std::uint64_t frame_sent = std::min(next.sent_bytes, data_begin);
      std::array<iovec, 2> parts{
          iovec{.iov_base = reinterpret_cast<std::byte*>(&next.frame) + frame_sent,
                .iov_len = data_begin - frame_sent},
          iovec{.iov_base = next.send.data + (next.sent_bytes - frame_sent),
                .iov_len = total - std::max(next.sent_bytes, data_begin)}};
      msghdr message{};
      message.msg_iov = parts.data();
      message.msg_iovlen = parts.size();
      const ssize_t sent = ::sendmsg(peer.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0) {
        if (errno == EINTR) continue;
        if (errno != EAGAIN) peer.socket = ProcessFd();  // what waits for it says so
        return;
      }
      next.sent_bytes += static_cast<std::uint64_t>(sent);
      if (next.sent_bytes < total) return;
      if (next.frame.kind == FrameKind::kData) ended_.push_back(next.send.number);
      peer.out.pop_front();
    }
  }

  // One system call for all of them.
  bool has_news() {
    polled_.clear();
    for (const Peer& peer : peers_)
      if (peer.socket) polled_.push_back({.fd = peer.socket.get(), .events = POLLIN, .revents = 0});
    return ::poll(polled_.data(), polled_.size(), 0) > 0;
  }

  // Reads until nothing is left.
  void receive_from(std::uint32_t rank) {
    Peer& peer = peers_[rank];
    while (peer.socket) {
      std::byte* target = peer.incoming
                              ? peer.incoming->data + peer.incoming_bytes
                              : reinterpret_cast<std::byte*>(&peer.frame) + peer.frame_bytes;
      const std::uint64_t left = peer.incoming ? peer.incoming->size_bytes - peer.incoming_bytes
                                               : sizeof(Frame) - peer.frame_bytes;
      const ssize_t count = ::recv(peer.socket.get(), target, left, MSG_DONTWAIT);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0 && errno == EAGAIN) return;
      if (count <= 0) {
        peer.socket = ProcessFd();
        if (!peer.has_said_bye)
          fail(
              fmt::format("rank {} has lost its connection with rank {}; it has failed, or was "
                          "killed",
                          rank_, rank));
        return;
      }
      (peer.incoming ? peer.incoming_bytes : peer.frame_bytes) += static_cast<std::uint64_t>(count);
      if (peer.incoming) {
        end_incoming(peer);
      } else if (peer.frame_bytes == sizeof(Frame)) {
        peer.frame_bytes = 0;
        if (!take_frame(rank)) return;
      }
    }
  }

  void end_incoming(Peer& peer) {
    if (peer.incoming_bytes < peer.incoming->size_bytes) return;
    ended_.push_back(peer.incoming->number);
    peer.incoming.reset();
  }

  bool take_frame(std::uint32_t rank) {
    Peer& peer = peers_[rank];
    const Frame frame = peer.frame;
    switch (frame.kind) {
      case FrameKind::kAsk:
        if (const auto send = take_first(peer.sends, frame.tag)) {
          answer(rank, frame.tag, frame.size_bytes, *send);
          send_to(peer);
        } else {
          peer.asked[frame.tag].push_back(frame.size_bytes);
        }
        return true;
      case FrameKind::kData: {
        const auto receive = take_first(peer.receives, frame.tag);
        if (!receive || receive->size_bytes != frame.size_bytes) break;
        peer.incoming = receive;
        peer.incoming_bytes = 0;
        end_incoming(peer);
        return true;
      }
      case FrameKind::kBye: peer.has_said_bye = true; return true;
    }
    fail(fmt::format("rank {} sends rank {} something that it does not wait for", rank, rank_));
    peer.socket = ProcessFd();
    return false;
  }

  const std::uint32_t rank_;
  std::vector<Peer> peers_;  // by rank; the rank itself has no socket
  const std::vector<std::uint32_t> host_;
  std::vector<std::uint32_t> ended_;
  std::vector<std::uint32_t> free_;
  std::uint32_t numbers_ = 0;
  std::vector<pollfd> polled_;
  std::string failure_;
};

}  // namespace

std::unique_ptr<MessagePort> connect_ranks(const SocketDoor& door,
                                           std::span<const std::string> endpoints,
                                           double timeout_s) {
  const std::vector<SocketEndpoint> all = parse_endpoints(door, endpoints);
  std::vector<std::uint32_t> host;
  for (const SocketEndpoint& endpoint : all)
    if (endpoint.host == door.endpoint().host) host.push_back(endpoint.rank);
  return std::make_unique<SocketPort>(door.endpoint().rank, meet(door, all, timeout_s),
                                      std::move(host));
}

}  // namespace sluice
