#include "gpu/ranks/socket_meeting.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/error.h>

namespace sluice {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr const char* kEndpointFormat = "sluice1";
constexpr std::size_t kSecretDigits = 32;
// Connections that do not say who they are; more of them wait in the system.
constexpr std::size_t kUnknownMax = 64;
// Calls that were refused are tried again after this time.
constexpr milliseconds kPause{50};

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

// Numbers alone: no name is looked up.
Addresses addresses_of(const std::string& address, std::uint16_t port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const std::string service = std::to_string(port);
  if (::getaddrinfo(address.c_str(), service.c_str(), &hints, &found) != 0) found = nullptr;
  return {found, &::freeaddrinfo};
}

std::string random_digits() {
  std::array<std::uint8_t, kSecretDigits / 2> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    throw Error(ErrorCode::kUnsupported, "the system gives no random numbers");
  std::string digits;
  for (const std::uint8_t byte : bytes) digits += fmt::format("{:02x}", byte);
  return digits;
}

// Containers of one machine may number their processes apart.
std::string host_name() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::array<char, 64> processes{};
  if (boot.empty() || ::readlink("/proc/self/ns/pid", processes.data(), processes.size() - 1) < 0)
    return random_digits();
  return boot + "/" + processes.data();
}

// The first message on a new connection, in each direction. `secret` is the receiver's.
struct SocketHello {
  std::array<char, 8> format{};
  std::uint32_t rank = 0;
  std::uint32_t rank_count = 0;
  std::array<char, kSecretDigits> secret{};

  friend bool operator==(const SocketHello&, const SocketHello&) = default;
};

SocketHello hello(const SocketEndpoint& from, const SocketEndpoint& to) {
  SocketHello made{.format = {}, .rank = from.rank, .rank_count = from.rank_count, .secret = {}};
  std::strncpy(made.format.data(), kEndpointFormat, made.format.size());
  std::ranges::copy(to.secret, made.secret.begin());
  return made;
}

void say(int socket, const SocketHello& hello) {
  (void)::send(socket, &hello, sizeof hello, MSG_NOSIGNAL);  // the other side notices what is lost
}

ProcessFd open_socket(int family) {
  return ProcessFd::opened_by(
      [&] { return ::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
}

// A connection on which the other side has not said everything yet.
struct UnknownCaller {
  ProcessFd socket;
  std::array<std::byte, sizeof(SocketHello)> heard{};
  std::size_t heard_bytes = 0;
  bool is_connected = true;
  bool is_over = false;

  // Returns whether all has been heard.
  bool hear() {
    const ssize_t count =
        ::recv(socket.get(), heard.data() + heard_bytes, heard.size() - heard_bytes, MSG_DONTWAIT);
    if (count > 0) heard_bytes += static_cast<std::size_t>(count);
    if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) is_over = true;
    return heard_bytes == heard.size();
  }
  SocketHello said() const {
    SocketHello hello;
    std::memcpy(&hello, heard.data(), sizeof hello);
    return hello;
  }
};

class SocketMeeting {
 public:
  SocketMeeting(const SocketDoor& door, std::span<const SocketEndpoint> endpoints, double timeout_s)
      : door_(door),
        own_(door.endpoint()),
        endpoints_(endpoints),
        timeout_s_(timeout_s),
        end_(steady_clock::now() + std::chrono::duration_cast<steady_clock::duration>(
                                       std::chrono::duration<double>(timeout_s))),
        called_(own_.rank),
        call_again_(own_.rank),
        sockets_(own_.rank_count) {}

  std::vector<ProcessFd> run() {
    while (!is_complete()) {
      for (std::uint32_t rank = 0; rank < own_.rank; ++rank)
        if (!sockets_[rank] && !called_[rank].socket && steady_clock::now() >= call_again_[rank])
          call(rank);
      await_news();
      for (std::uint32_t rank = 0; rank < own_.rank; ++rank)
        if (!sockets_[rank] && called_[rank].socket) hear_called(rank);
      let_in();
      for (UnknownCaller& caller : callers_) hear_caller(caller);
      std::erase_if(callers_, [](const UnknownCaller& caller) { return caller.is_over; });
    }
    for (const ProcessFd& socket : sockets_) {
      const int on = 1;
      if (socket) (void)::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    }
    return std::move(sockets_);
  }

 private:
  bool is_complete() const {
    for (std::uint32_t rank = 0; rank < own_.rank_count; ++rank)
      if (rank != own_.rank && !sockets_[rank]) return false;
    return true;
  }

  // Begins to call. A rank whose door is open answers at once, or to the system's own attempts,
  // which may go on for minutes. The other ranks are heard meanwhile.
  void call(std::uint32_t rank) {
    call_again_[rank] = steady_clock::now() + kPause;
    const SocketEndpoint& to = endpoints_[rank];
    const Addresses found = addresses_of(to.address, to.port);
    if (found == nullptr) return;
    ProcessFd socket = open_socket(found->ai_family);
    if (!socket) return;
    if (::connect(socket.get(), found->ai_addr, found->ai_addrlen) != 0 && errno != EINPROGRESS)
      return;
    called_[rank] = UnknownCaller{.socket = std::move(socket), .is_connected = false};
  }

  // Whether the call is through. A call that has failed is over.
  bool is_through(UnknownCaller& called) const {
    pollfd news{.fd = called.socket.get(), .events = POLLOUT, .revents = 0};
    if (::poll(&news, 1, 0) <= 0) return false;
    int error = 0;
    socklen_t length = sizeof error;
    called.is_over =
        ::getsockopt(called.socket.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error != 0;
    return !called.is_over;
  }

  void hear_called(std::uint32_t rank) {
    UnknownCaller& called = called_[rank];
    if (!called.is_connected && is_through(called)) {
      called.is_connected = true;
      say(called.socket.get(), hello(own_, endpoints_[rank]));
    }
    if (called.is_connected && called.hear() && called.said() == hello(endpoints_[rank], own_)) {
      sockets_[rank] = std::move(called.socket);
    } else if (called.is_over || called.heard_bytes == called.heard.size()) {
      called = UnknownCaller();  // another process, or a door that is closed: call again
    }
  }

  // Where the room is full, the caller that has been silent for longest goes. A rank calls again.
  void let_in() {
    for (std::size_t i = 0; i < kUnknownMax; ++i) {
      ProcessFd socket = ProcessFd::opened_by([&] {
        return ::accept4(door_.socket(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      });
      if (!socket) return;
      if (callers_.size() == kUnknownMax) callers_.erase(callers_.begin());
      callers_.push_back({.socket = std::move(socket)});
    }
  }

  void hear_caller(UnknownCaller& caller) {
    if (!caller.hear()) return;
    caller.is_over = true;
    const std::uint32_t rank = caller.said().rank;
    if (rank <= own_.rank || rank >= own_.rank_count || sockets_[rank]) return;
    if (caller.said() != hello(endpoints_[rank], own_)) return;  // a stranger
    say(caller.socket.get(), hello(own_, endpoints_[rank]));
    sockets_[rank] = std::move(caller.socket);
  }

  void await_news() {
    const auto now = steady_clock::now();
    if (now >= end_) fail();
    std::vector<pollfd> sockets{{.fd = door_.socket(), .events = POLLIN, .revents = 0}};
    for (const UnknownCaller& called : called_)
      if (called.socket)
        sockets.push_back({.fd = called.socket.get(),
                           .events = static_cast<short>(called.is_connected ? POLLIN : POLLOUT),
                           .revents = 0});
    for (const UnknownCaller& caller : callers_)
      sockets.push_back({.fd = caller.socket.get(), .events = POLLIN, .revents = 0});
    const auto pause = std::min(kPause, std::chrono::ceil<milliseconds>(end_ - now));
    (void)::poll(sockets.data(), sockets.size(), static_cast<int>(pause.count()));
  }

  [[noreturn]] void fail() const {
    std::vector<std::string> missing;
    for (std::uint32_t rank = 0; rank < own_.rank_count; ++rank)
      if (rank != own_.rank && !sockets_[rank])
        missing.push_back(fmt::format("rank {} ({})", rank, endpoints_[rank].address));
    throw Error(ErrorCode::kRanks,
                fmt::format("rank {} ({}) has waited {} s for a connection with {}; it may have "
                            "failed or be stopped, its address may be out of reach, or a firewall "
                            "may be between; if it is only late, raise sharding.timeout",
                            own_.rank, own_.address, timeout_s_, fmt::join(missing, ", ")));
  }

  const SocketDoor& door_;
  const SocketEndpoint& own_;
  const std::span<const SocketEndpoint> endpoints_;
  const double timeout_s_;
  const steady_clock::time_point end_;
  std::vector<UnknownCaller> called_;  // by rank: those before this one, that have not answered yet
  std::vector<steady_clock::time_point> call_again_;  // by rank: not earlier
  std::vector<UnknownCaller> callers_;
  std::vector<ProcessFd> sockets_;  // by rank
};

SocketEndpoint parse_endpoint(const std::string& text, std::uint32_t rank,
                              std::uint32_t rank_count) {
  SocketEndpoint endpoint;
  std::string format;
  std::istringstream words(text);
  words >> format >> endpoint.rank >> endpoint.rank_count >> endpoint.address >> endpoint.port >>
      endpoint.secret >> endpoint.host;
  if (!words || format != kEndpointFormat || endpoint.rank != rank ||
      endpoint.rank_count != rank_count || endpoint.secret.size() != kSecretDigits)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the text number {} of {} is not the endpoint of rank {}; give every "
                            "rank's own text, by rank",
                            rank, rank_count, rank));
  if (addresses_of(endpoint.address, endpoint.port) == nullptr)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the text number {} of {} has the address \"{}\", which is no IP "
                            "address; give every rank's own text, by rank",
                            rank, rank_count, endpoint.address));
  return endpoint;
}

}  // namespace

std::string SocketEndpoint::text() const {
  return fmt::format("{} {} {} {} {} {} {}", kEndpointFormat, rank, rank_count, address, port,
                     secret, host);
}

SocketDoor::SocketDoor(const std::string& address, std::uint32_t rank, std::uint32_t rank_count)
    : endpoint_{.rank = rank,
                .rank_count = rank_count,
                .address = address,
                .port = 0,
                .secret = random_digits(),
                .host = host_name()} {
  if (rank >= rank_count)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("rank {} does not exist among {} ranks", rank, rank_count));
  const Addresses found = addresses_of(address, 0);
  if (found == nullptr)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("\"{}\" is no IP address; give one of this host, such as 127.0.0.1 if "
                            "all ranks are on it",
                            address));
  socket_ = open_socket(found->ai_family);
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  if (!socket_ || ::bind(socket_.get(), found->ai_addr, found->ai_addrlen) != 0 ||
      ::listen(socket_.get(), SOMAXCONN) != 0 ||
      ::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&bound), &length) != 0)
    throw Error(ErrorCode::kUnsupported,
                fmt::format("rank {} cannot listen at {}: {}", rank, address, errno_text(errno)));
  endpoint_.port =
      ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(bound).sin6_port
                                        : reinterpret_cast<const sockaddr_in&>(bound).sin_port);
}

std::vector<SocketEndpoint> parse_endpoints(const SocketDoor& door,
                                            std::span<const std::string> texts) {
  const std::uint32_t rank_count = door.endpoint().rank_count;
  if (texts.size() != rank_count)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("there are {} ranks, but {} endpoints", rank_count, texts.size()));
  std::vector<SocketEndpoint> endpoints;
  for (std::uint32_t rank = 0; rank < rank_count; ++rank)
    endpoints.push_back(parse_endpoint(texts[rank], rank, rank_count));
  // Texts of an earlier start have other doors and secrets, so no rank would ever answer.
  if (const std::uint32_t own = door.endpoint().rank;
      endpoints[own].text() != door.endpoint().text())
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the text number {} of {} is another endpoint than rank {} has now, as "
                            "from an earlier start; send every rank the endpoints of this start",
                            own, rank_count, own));
  return endpoints;
}

std::vector<ProcessFd> meet(const SocketDoor& door, std::span<const SocketEndpoint> endpoints,
                            double timeout_s) {
  return SocketMeeting(door, endpoints, timeout_s).run();
}

}  // namespace sluice
