// Messages over a connection whose calls fail in unforeseen ways.
#include "gpu/ranks/message_thread.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <thread>

#include "tests/support/expect_error.h"

namespace sluice {
namespace {

// One of two ranks, whose messages cannot be begun.
class FullPort final : public MessagePort {
 public:
  bool ends_with_others() const override { return false; }
  std::string version() const override { return "full"; }
  std::uint32_t rank() const override { return 0; }
  std::uint32_t rank_count() const override { return 2; }
  int tag_max() const override { return 100; }
  std::uint32_t start_send(const std::byte*, std::uint64_t, std::uint32_t, int) override {
    throw std::bad_alloc();
  }
  std::uint32_t start_receive(std::byte*, std::uint64_t, std::uint32_t, int) override {
    throw std::bad_alloc();
  }
  void test(std::vector<std::uint32_t>&, std::string&) override {}
  std::vector<std::uint32_t> host_ranks() override { return {}; }
  bool broadcast_on_host(std::span<std::byte>) override { return false; }
  bool agree_on_host(bool) override { return false; }
  [[noreturn]] void abort() override { std::abort(); }
};

// Both for a thread that moves its own messages and for the class's thread.
TEST(MessageThread, MessagesThatCannotBeBegunAreAFailureOfAll) {
  for (const bool is_large : {false, true}) {
    MessageThread messages({.connection = {.kind = "full",
                                           .opening = "the opening",
                                           .closing = "the closing",
                                           .open = [] { return std::make_unique<FullPort>(); }},
                            .timeout_s = 20,
                            .on_wait = {}});
    messages.await_open();
    std::byte data{};
    const auto batch = std::make_shared<MessageBatch>();
    batch->messages = {{.data = &data, .size_bytes = 1, .peer = 1, .tag = 3, .is_send = true}};
    batch->is_large = is_large;
    EXPECT_NO_THROW(messages.start(batch));
    const RankWait how{.timeout_s = 1, .kind = "broadcast", .subject = "wte"};
    std::thread other([&] {  // waits for nothing of its own to come
      MessageBatch never;
      never.messages = batch->messages;
      never.is_ended = {false};
      never.left = 1;
      test::expect_error(ErrorCode::kRanks, [&] { messages.wait(never, how); });
    });
    const std::string message =
        test::expect_error(ErrorCode::kRanks, [&] { messages.wait(*batch, how); });
    EXPECT_EQ(message, "rank 0 cannot move its messages: " + std::string(std::bad_alloc().what()));
    other.join();
    EXPECT_EQ(messages.await_end(), "");
  }
}

// Whatever is thrown while the ranks connect is an error of the one that waits for it.
TEST(MessageThread, AConnectionThatFailsInAnUnforeseenWayIsAnError) {
  MessageThread messages(
      {.connection = {.kind = "full",
                      .opening = "the opening",
                      .closing = "the closing",
                      .open = []() -> std::unique_ptr<MessagePort> { throw std::bad_alloc(); }},
       .timeout_s = 20,
       .on_wait = {}});
  const std::string message =
      test::expect_error(ErrorCode::kInternal, [&] { messages.await_open(); });
  EXPECT_EQ(message, "the opening failed: " + std::string(std::bad_alloc().what()));
  EXPECT_TRUE(messages.has_ended());
}

}  // namespace
}  // namespace sluice
