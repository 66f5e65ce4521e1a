// The contract of collectives over sockets, by threads with a connection each; messages between
// ports; strangers, and ranks that do not come or go away.
#include "gpu/ranks/socket_collectives.h"

#include <gtest/gtest.h>

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/unique_fd.h"
#include "cpu_optim/rank_sum.h"
#include "gpu/ranks/message_port.h"
#include "gpu/ranks/socket_meeting.h"
#include "tests/contract/collectives_contract.h"
#include "tests/gpu/ranks/socket_ranks.h"
#include "tests/support/expect_error.h"
#include "tests/support/paused_child.h"

namespace sluice {
namespace {

using test::expect_error;

CollectivesFactory factory(std::uint32_t ranks, RankPath path, const std::string& name) {
  return {name, [ranks, path](const RankBody& body) {
            run_threads(ranks, {.timeout_s = 60, .sum = sum_in_order, .path = path}, body);
          }};
}

INSTANTIATE_TEST_SUITE_P(Sockets, CollectivesContract,
                         testing::Values(factory(1, RankPath::kBest, "one"),
                                         factory(2, RankPath::kBest, "two_best"),
                                         factory(2, RankPath::kMessages, "two"),
                                         factory(3, RankPath::kMessages, "three"),
                                         factory(4, RankPath::kMessages, "four")),
                         collectives_factory_name);

std::vector<std::unique_ptr<MessagePort>> connected(std::uint32_t count) {
  const Doors meeting(count);
  std::vector<std::unique_ptr<MessagePort>> ports(count);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < count; ++rank)
    threads.emplace_back(
        [&, rank] { ports[rank] = connect_ranks(*meeting.doors[rank], meeting.endpoints, 20); });
  for (std::thread& thread : threads) thread.join();
  return ports;
}

// Moves the messages of all ports until `number` of `port` has ended. Returns its failure.
std::string await(std::vector<std::unique_ptr<MessagePort>>& ports, std::size_t port,
                  std::uint32_t number) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (std::chrono::steady_clock::now() < end) {
    for (std::size_t i = 0; i < ports.size(); ++i) {
      if (ports[i] == nullptr) continue;
      std::vector<std::uint32_t> ended;
      std::string failure;
      ports[i]->test(ended, failure);
      if (i != port) continue;
      if (!failure.empty()) return failure;
      if (std::ranges::count(ended, number) != 0) return "";
    }
  }
  return "it has not ended";
}

// Data goes only where it is waited for: the first message does not stand in the way of the second.
TEST(SocketPort, MessagesOfOtherTagsPassOneThatNobodyWaitsFor) {
  auto ports = connected(2);
  std::vector<std::byte> large(64 << 20, std::byte{7});
  std::byte small{9};
  std::byte received{};
  const std::uint32_t late = ports[0]->start_send(large.data(), large.size(), 1, 1);
  (void)ports[0]->start_send(&small, 1, 1, 2);
  EXPECT_EQ(await(ports, 1, ports[1]->start_receive(&received, 1, 0, 2)), "");
  EXPECT_EQ(received, small);
  std::vector<std::byte> target(large.size());
  (void)ports[1]->start_receive(target.data(), target.size(), 0, 1);
  EXPECT_EQ(await(ports, 0, late), "");
}

TEST(SocketPort, MessagesOfOneTagComeInOrder) {
  auto ports = connected(2);
  std::array<std::uint32_t, 100> sent{};
  std::array<std::uint32_t, 100> received{};
  std::iota(sent.begin(), sent.end(), 1);
  std::uint32_t last = 0;
  for (std::size_t i = 0; i < sent.size(); ++i) {
    const auto receive = [&] {
      last = ports[1]->start_receive(reinterpret_cast<std::byte*>(&received[i]), 4, 0, 3);
    };
    if (i % 2 == 0) receive();
    (void)ports[0]->start_send(reinterpret_cast<const std::byte*>(&sent[i]), 4, 1, 3);
    if (i % 2 != 0) receive();
  }
  EXPECT_EQ(await(ports, 1, last), "");
  EXPECT_EQ(received, sent);
}

TEST(SocketPort, MessagesOfUnequalSizesAreAFailure) {
  auto ports = connected(2);
  std::array<std::byte, 8> data{};
  (void)ports[1]->start_receive(data.data(), 8, 0, 3);
  EXPECT_EQ(await(ports, 0, ports[0]->start_send(data.data(), 4, 1, 3)),
            "rank 1 waits for 8 B from rank 0, which sends 4 B: the ranks disagree about the "
            "sequence; start all with one config and model");
}

TEST(SocketPort, RankThatHasLeftIsNoFailureUnlessSomebodyWaitsForIt) {
  auto ports = connected(3);
  ports[2].reset();
  std::byte data{};
  (void)ports[1]->start_send(&data, 1, 0, 3);
  EXPECT_EQ(await(ports, 0, ports[0]->start_receive(&data, 1, 1, 3)), "");
  EXPECT_EQ(await(ports, 0, ports[0]->start_receive(&data, 1, 2, 3)),
            "rank 2 has ended its connection, but rank 0 waits for it");
}

// After a failure a rank leaves in the middle of a message, whose memory may be gone by then:
// nothing more of it is sent, and the other rank does not take this end for a good one.
TEST(SocketPort, RankThatLeavesInAMessageSendsNoMoreOfIt) {
  auto ports = connected(2);
  constexpr std::byte kSent{7};
  constexpr std::byte kGone{13};
  std::vector<std::byte> large(64 << 20, kSent);
  std::vector<std::byte> target(large.size());
  std::vector<std::uint32_t> ended;
  std::string failure;
  const std::uint32_t receive = ports[1]->start_receive(target.data(), target.size(), 0, 3);
  (void)ports[0]->start_send(large.data(), large.size(), 1, 3);
  // Until some of it has come. Each turn leaves room for more on the way.
  while (target[0] != kSent) {
    ports[0]->test(ended, failure);
    ports[1]->test(ended, failure);
  }
  ASSERT_EQ(target.back(), std::byte{});
  ASSERT_EQ(failure, "");
  std::ranges::fill(large, kGone);
  ports[0].reset();
  EXPECT_EQ(await(ports, 1, receive),
            "rank 1 has lost its connection with rank 0; it has failed, or was killed");
  EXPECT_EQ(std::ranges::count(target, kGone), 0);
}

// The rank has given up its waits, and the memory of its messages may be gone.
TEST(SocketPort, AfterAFailureNothingComesIn) {
  auto ports = connected(3);
  std::byte sent{7};
  std::byte received{};
  std::byte other{};
  (void)ports[0]->start_receive(&received, 1, 1, 3);
  ports[2].reset();
  EXPECT_NE(await(ports, 0, ports[0]->start_receive(&other, 1, 2, 3)), "");
  const std::uint32_t send = ports[1]->start_send(&sent, 1, 0, 3);
  EXPECT_EQ(await(ports, 1, send), "");
  EXPECT_NE(await(ports, 0, UINT32_MAX), "");
  EXPECT_EQ(received, std::byte{});
}

// Although a child of that process lives on, such as the worker of a data loader.
TEST(SocketPort, RankWhoseProcessEndsIsNamedAtOnce) {
  const SocketDoor door(kHere, 0, 2);
  int told[2];
  ASSERT_EQ(::pipe(told), 0);
  const pid_t process = ::fork();
  if (process == 0) {
    const SocketDoor own(kHere, 1, 2);
    const std::string endpoint = own.endpoint().text() + "\n";
    (void)!::write(told[1], endpoint.data(), endpoint.size());
    const std::vector<std::string> endpoints{door.endpoint().text(), own.endpoint().text()};
    const auto port = connect_ranks(own, endpoints, 20);
    const test::PausedChild worker;
    const pid_t number = worker.pid();
    (void)!::write(told[1], &number, sizeof number);
    ::_exit(0);  // the worker stays
  }
  std::string endpoint;
  for (char next = 0; ::read(told[0], &next, 1) == 1 && next != '\n';) endpoint += next;
  const std::vector<std::string> endpoints{door.endpoint().text(), endpoint};
  std::vector<std::unique_ptr<MessagePort>> ports;
  ports.push_back(connect_ranks(door, endpoints, 20));
  pid_t worker = 0;
  ASSERT_EQ(::read(told[0], &worker, sizeof worker), static_cast<ssize_t>(sizeof worker));
  std::byte data{};
  EXPECT_EQ(await(ports, 0, ports[0]->start_receive(&data, 1, 1, 3)),
            "rank 0 has lost its connection with rank 1; it has failed, or was killed");
  EXPECT_EQ(::kill(worker, SIGKILL), 0);
  ::waitpid(process, nullptr, 0);
  ::close(told[0]);
  ::close(told[1]);
}

// Small messages move on the threads that wait for them, large ones on a thread of their own.
TEST(SocketFailure, RankThatDoesNotComeIsNamedOnEveryOther) {
  for (const std::uint64_t shard_bytes : {std::uint64_t{64}, std::uint64_t{4_MiB}}) {
    std::atomic<int> finished = 0;
    run_threads(3, {.timeout_s = 2, .sum = sum_in_order, .path = RankPath::kMessages},
                [&](Collectives& ranks, Device& device) {
                  if (ranks.rank() == 1) {
                    while (finished < 2) std::this_thread::sleep_for(std::chrono::milliseconds(5));
                    return;
                  }
                  const Stream stream(device, "test");
                  const DeviceBuffer data(device, 3 * shard_bytes, "a test");
                  ranks.all_gather({.target = data.data(),
                                    .source = data.data() + ranks.rank() * shard_bytes,
                                    .shard_bytes = shard_bytes,
                                    .subject = "h.3"},
                                   stream.id());
                  const std::string message =
                      expect_error(ErrorCode::kRanks, [&] { device.synchronize(stream.id()); });
                  EXPECT_TRUE(message.starts_with(
                      "rank 1 has not answered rank " + std::to_string(ranks.rank()) +
                      " in all_gather of \"h.3\" within 2 s; a rank may have been killed"))
                      << message;
                  ++finished;
                });
  }
}

// A host that drops what it is sent: the system would go on calling for two minutes.
class DeafDoor {
 public:
  DeafDoor() : deaf_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    auto* const general = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(::bind(deaf_.get(), general, length), 0);
    EXPECT_EQ(::listen(deaf_.get(), 0), 0);
    EXPECT_EQ(::getsockname(deaf_.get(), general, &length), 0);
    port_ = ntohs(address.sin_port);
    // These calls are not taken, so that the system drops the next one.
    for (int i = 0; i < 4; ++i) {
      callers_.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
      (void)::connect(callers_.back().get(), general, length);
    }
  }
  // Makes calls of rank `rank` come here.
  void stand_for(Doors& meeting, std::uint32_t rank) const {
    std::string& endpoint = meeting.endpoints[rank];
    const std::string port = " " + std::to_string(meeting.doors[rank]->endpoint().port) + " ";
    ASSERT_NE(endpoint.find(port), std::string::npos) << endpoint;
    endpoint.replace(endpoint.find(port), port.size(), " " + std::to_string(port_) + " ");
  }
  void shut() const { (void)::shutdown(deaf_.get(), SHUT_RDWR); }

 private:
  UniqueFd deaf_;
  std::uint16_t port_ = 0;
  std::vector<UniqueFd> callers_;
};

TEST(SocketMeeting, ACallThatIsNotAnsweredIsGivenUp) {
  Doors meeting(2);
  const DeafDoor deaf;
  deaf.stand_for(meeting, 0);
  std::atomic<bool> is_over = false;
  std::atomic<bool> was_helped = false;
  std::thread helper([&] {  // a call that goes on is refused, once that door is shut
    for (int i = 0; i < 400 && !is_over; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    was_helped = !is_over;
    if (was_helped) deaf.shut();
  });
  const std::string message = expect_error(
      ErrorCode::kRanks, [&] { (void)connect_ranks(*meeting.doors[1], meeting.endpoints, 0.5); });
  is_over = true;
  helper.join();
  EXPECT_FALSE(was_helped) << "it still calls after 20 s";
  EXPECT_NE(message.find("has waited 0.5 s for a connection with rank 0"), std::string::npos)
      << message;
}

// Rank 2 calls rank 0 in vain, and rank 1, which answers.
TEST(SocketMeeting, ARankThatAnswersIsNotBlamedForOneThatDoesNot) {
  Doors meeting(3);
  const DeafDoor deaf;
  deaf.stand_for(meeting, 0);
  std::thread healthy([&] {
    expect_error(ErrorCode::kRanks,
                 [&] { (void)connect_ranks(*meeting.doors[1], meeting.endpoints, 3); });
  });
  const auto begin = std::chrono::steady_clock::now();
  const std::string message = expect_error(
      ErrorCode::kRanks, [&] { (void)connect_ranks(*meeting.doors[2], meeting.endpoints, 2.1); });
  // A call that blocks can be given up only behind whole seconds, so behind 3.
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(2950));
  healthy.join();
  EXPECT_NE(message.find("has waited 2.1 s for a connection with rank 0 (127.0.0.1); it may"),
            std::string::npos)
      << message;
}

TEST(SocketMeeting, RankThatDoesNotComeIsNamed) {
  const Doors meeting(3);
  std::thread other([&] {
    expect_error(ErrorCode::kRanks,
                 [&] { (void)connect_ranks(*meeting.doors[2], meeting.endpoints, 0.5); });
  });
  const std::string message = expect_error(
      ErrorCode::kRanks, [&] { (void)connect_ranks(*meeting.doors[0], meeting.endpoints, 0.5); });
  other.join();
  EXPECT_NE(message.find("rank 0 (127.0.0.1) has waited 0.5 s for a connection with rank 1 "
                         "(127.0.0.1); it may have failed"),
            std::string::npos)
      << message;
}

// A stranger who comes first, says rubbish, says nothing, or does not know the secret.
TEST(SocketMeeting, StrangersStayOutside) {
  const Doors meeting(2);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(meeting.doors[0]->endpoint().port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::vector<UniqueFd> strangers;
  std::array<std::byte, 48> hello{};
  std::memcpy(hello.data(), "sluice1", 7);
  const std::uint32_t rank_and_count[] = {1, 2};
  std::memcpy(hello.data() + 8, rank_and_count, sizeof rank_and_count);
  // More silent ones than there is room for, then others.
  std::vector<std::size_t> lengths(100, 0);
  lengths.insert(lengths.end(), {7, 48});
  for (const std::size_t said : lengths) {
    strangers.emplace_back(::socket(AF_INET, SOCK_STREAM, 0));
    ASSERT_EQ(
        ::connect(strangers.back().get(), reinterpret_cast<sockaddr*>(&address), sizeof address),
        0);
    ASSERT_EQ(::send(strangers.back().get(), hello.data(), said, 0), static_cast<ssize_t>(said));
  }
  std::vector<std::unique_ptr<MessagePort>> ports(2);
  std::thread other([&] { ports[1] = connect_ranks(*meeting.doors[1], meeting.endpoints, 20); });
  ports[0] = connect_ranks(*meeting.doors[0], meeting.endpoints, 20);
  other.join();
  std::byte sent{5};
  std::byte received{};
  (void)ports[1]->start_send(&sent, 1, 0, 3);
  EXPECT_EQ(await(ports, 0, ports[0]->start_receive(&received, 1, 1, 3)), "");
  EXPECT_EQ(received, sent);
}

// As from files, or from the lines of another program.
TEST(SocketMeeting, WhiteSpaceAroundEndpointsDoesNotMatter) {
  Doors meeting(2);
  for (std::string& endpoint : meeting.endpoints) endpoint = " " + endpoint + "\r\n";
  for (const auto& door : meeting.doors) {
    std::vector<SocketEndpoint> parsed;
    ASSERT_NO_THROW(parsed = parse_endpoints(*door, meeting.endpoints));
    EXPECT_EQ(parsed[1].text(), meeting.doors[1]->endpoint().text());
  }
}

TEST(SocketMeeting, EndpointsAreThoseOfTheRanks) {
  const Doors meeting(2);
  const auto refusal = [&](const std::vector<std::string>& endpoints) {
    return expect_error(ErrorCode::kInvalidArgument,
                        [&] { (void)connect_ranks(*meeting.doors[0], endpoints, 1); });
  };
  EXPECT_EQ(refusal({meeting.endpoints[0]}), "there are 2 ranks, but 1 endpoints");
  const std::string wrong =
      "the text number 1 of 2 is not the endpoint of rank 1; give every rank's own text, by rank";
  EXPECT_EQ(refusal({meeting.endpoints[0], meeting.endpoints[0]}), wrong);
  EXPECT_EQ(refusal({meeting.endpoints[0], ""}), wrong);
  EXPECT_EQ(refusal({meeting.endpoints[0], Doors(3).endpoints[1]}), wrong);
  EXPECT_EQ(refusal(Doors(2).endpoints),
            "the text number 0 of 2 is another endpoint than rank 0 has now, as from an earlier "
            "start; send every rank the endpoints of this start");
  std::string unreadable = meeting.endpoints[1];
  unreadable.replace(unreadable.find(kHere), std::strlen(kHere), "example.org");
  EXPECT_EQ(refusal({meeting.endpoints[0], unreadable}),
            "the text number 1 of 2 has the address \"example.org\", which is no IP address; give "
            "every rank's own text, by rank");
  EXPECT_NE(expect_error(ErrorCode::kInvalidArgument, [] { SocketDoor("example.org", 0, 2); })
                .find("\"example.org\" is no IP address"),
            std::string::npos);
  EXPECT_EQ(expect_error(ErrorCode::kInvalidArgument, [] { SocketDoor(kHere, 2, 2); }),
            "rank 2 does not exist among 2 ranks");
  EXPECT_NE(expect_error(ErrorCode::kUnsupported, [] { SocketDoor("192.0.2.1", 0, 2); })
                .find("rank 0 cannot listen at 192.0.2.1: "),
            std::string::npos);
}

}  // namespace
}  // namespace sluice
