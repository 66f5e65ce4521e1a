#include <thread>
#include <vector>

#include "tests/contract/io_queue_contract.h"

namespace sluice::test {
namespace {

INSTANTIATE_TEST_SUITE_P(Sync, IoQueueContract,
                         ::testing::Values(IoQueueFactory{"sync", make_sync_queue}));

TEST(SyncQueue, CompletesInsideSubmitInOrder) {
  static std::vector<const IoRequest*> completed;
  completed.clear();
  const auto queue = make_sync_queue({.depth = 1});
  EXPECT_EQ(queue->name(), "sync");
  std::vector<IoRequest> requests(10);  // without a file: they fail, in order too
  std::vector<IoRequest*> pointers;
  for (IoRequest& request : requests) {
    request.on_complete = [](IoRequest& done) { completed.push_back(&done); };
    pointers.push_back(&request);
  }
  queue->submit(pointers);
  ASSERT_EQ(completed.size(), requests.size());
  for (std::size_t i = 0; i < requests.size(); ++i) EXPECT_EQ(completed[i], pointers[i]);
}

}  // namespace
}  // namespace sluice::test
