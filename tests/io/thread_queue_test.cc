#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "tests/contract/io_queue_contract.h"

namespace sluice::test {
namespace {

INSTANTIATE_TEST_SUITE_P(Threads, IoQueueContract,
                         ::testing::Values(IoQueueFactory{"threads", make_thread_queue}));

// /dev/null and a pipe serve pread no offsets, so a FIFO cannot hold a request up here; a callback
// that blocks does.
struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  int waiting = 0;
  bool is_open = false;

  void pass() {
    std::unique_lock lock(mutex);
    ++waiting;
    changed.notify_all();
    changed.wait(lock, [this] { return is_open; });
  }
  void await(int count) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return waiting == count; });
  }
  void open() {
    {
      const std::scoped_lock lock(mutex);
      is_open = true;
    }
    changed.notify_all();
  }
};

std::vector<IoRequest> gated_requests(std::size_t count, Gate& gate) {
  std::vector<IoRequest> requests(count);  // without a file: they fail at once
  for (IoRequest& request : requests) {
    request.context = &gate;
    request.on_complete = [](IoRequest& done) { static_cast<Gate*>(done.context)->pass(); };
  }
  return requests;
}

TEST(ThreadQueue, ServesAsManyRequestsAtOnceAsItsDepth) {
  Gate gate;
  auto requests = gated_requests(6, gate);
  const auto queue = make_thread_queue({.depth = 6});
  EXPECT_EQ(queue->name(), "threads");
  for (IoRequest& request : requests) {
    IoRequest* const pointer = &request;
    queue->submit({&pointer, 1});
  }
  gate.await(6);  // would hang with fewer
  gate.open();
  queue->wait_idle();
}

// Depth 2: two at work, and room for `backlog` more.
TEST(ThreadQueue, SubmitBlocksWhileFull) {
  for (const std::uint32_t backlog : {0u, 3u}) {
    Gate gate;
    const std::size_t room = 2 + (backlog == 0 ? 2 : backlog);
    auto requests = gated_requests(room + 1, gate);
    const auto queue = make_thread_queue({.depth = 2, .backlog = backlog});
    std::vector<IoRequest*> pointers;
    for (IoRequest& request : requests) pointers.push_back(&request);
    queue->submit(std::span(pointers).first(2));
    gate.await(2);
    queue->submit(std::span(pointers).subspan(2, room - 2));
    std::atomic<bool> returned = false;
    std::thread submitter([&] {
      queue->submit(std::span(pointers).last(1));
      returned = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_FALSE(returned);
    gate.open();
    submitter.join();
    queue->wait_idle();
    EXPECT_EQ(queue->counters().failed, room + 1);
  }
}

// With a depth of 40, 32 are at work.
TEST(ThreadQueue, TakesItsDepthTwiceBeyondItsThreadsToo) {
  Gate gate;
  auto requests = gated_requests(80, gate);
  const auto queue = make_thread_queue({.depth = 40});
  std::vector<IoRequest*> pointers;
  for (IoRequest& request : requests) pointers.push_back(&request);
  std::atomic<bool> returned = false;
  std::thread submitter([&] {
    queue->submit(pointers);
    returned = true;
  });
  for (int i = 0; i < 2000 && !returned; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_TRUE(returned);
  gate.open();
  submitter.join();
  queue->wait_idle();
}

TEST(ThreadQueueDeathTest, CallbackMustNotSubmitToItsOwnQueue) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        static IoQueue* own;
        const auto queue = make_thread_queue({});
        own = queue.get();
        IoRequest request;
        request.on_complete = [](IoRequest& done) {
          IoRequest* const again = &done;
          own->submit({&again, 1});
        };
        IoRequest* const pointer = &request;
        queue->submit({&pointer, 1});
        queue->wait_idle();
      },
      "neither submit to its own queue");
}

}  // namespace
}  // namespace sluice::test
