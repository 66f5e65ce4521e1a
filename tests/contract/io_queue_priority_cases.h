// These cases test the part of the IoQueue contract that is about priorities. The queue has depth
// 1, and the callback of one request blocks the queue until all other requests are in the queue.
// Then the requests start one after another, and complete in the order of their starts. The sync
// queue cannot be blocked, but orders the requests of one submit() by priority. This file is a part
// of io_queue_contract.h.
#pragma once

#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include "tests/contract/io_queue_fixture.h"

namespace sluice::test {

// Submits requests with `priorities` in one call, and returns the numbers of the requests in the
// order of completion.
inline std::vector<std::size_t> order_of_completion(IoQueue& queue,
                                                    const std::vector<IoPriority>& priorities) {
  struct Blocker {
    IoRequest request;
    std::promise<void> reached;
    std::promise<void> may_end;
  } blocker;
  blocker.request.context = &blocker;
  blocker.request.on_complete = [](IoRequest& done) {
    auto* self = static_cast<Blocker*>(done.context);
    std::future<void> end = self->may_end.get_future();
    self->reached.set_value();
    end.wait();
  };
  static std::mutex mutex;
  static std::vector<const IoRequest*> completed;
  completed.clear();
  std::vector<IoRequest> requests(priorities.size());  // no file, so requests fail immediately
  std::vector<IoRequest*> pointers;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].priority = priorities[i];
    requests[i].on_complete = [](IoRequest& done) {
      const std::scoped_lock lock(mutex);
      completed.push_back(&done);
    };
    pointers.push_back(&requests[i]);
  }
  IoRequest* const first = &blocker.request;
  std::thread submitter([&] { queue.submit({&first, 1}); });
  blocker.reached.get_future().wait();
  queue.submit(pointers);
  blocker.may_end.set_value();
  submitter.join();
  queue.wait_idle();
  std::vector<std::size_t> order;
  for (const IoRequest* request : completed)
    order.push_back(static_cast<std::size_t>(request - requests.data()));
  return order;
}

TEST_P(IoQueueContract, WaitingRequestsStartByPriorityThenInTheOrderTheyCame) {
  using enum IoPriority;
  const auto queue = GetParam().make({.depth = 1, .backlog = 16});
  EXPECT_EQ(order_of_completion(*queue,
                                {kLow, kNormal, kHigh, kNormal, kLow, kHigh, kNormal, kHigh, kLow}),
            (std::vector<std::size_t>{2, 5, 7, 1, 3, 6, 0, 4, 8}));
  EXPECT_EQ(order_of_completion(*queue, {kHigh, kHigh}), (std::vector<std::size_t>{0, 1}));
}

TEST_P(IoQueueContract, LowPriorityIsNotStarved) {
  constexpr std::size_t kRequests = 100;
  constexpr std::size_t kPassedOver = 16;
  const auto queue = GetParam().make({.depth = 1, .backlog = kRequests});
  std::vector<IoPriority> priorities(kRequests, IoPriority::kHigh);
  priorities[0] = priorities[1] = IoPriority::kLow;
  priorities[2] = IoPriority::kNormal;
  const std::vector<std::size_t> order = order_of_completion(*queue, priorities);
  ASSERT_EQ(order.size(), kRequests);
  const auto place = [&](std::size_t request) {
    return static_cast<std::size_t>(std::ranges::find(order, request) - order.begin());
  };
  EXPECT_EQ(place(2), kPassedOver);          // after sixteen requests with high priority
  EXPECT_EQ(place(0), kPassedOver + 1);      // request 0 has waited equally long
  EXPECT_EQ(place(1), 2 * kPassedOver + 2);  // after sixteen other requests
}

}  // namespace sluice::test
