#include <atomic>

#include "tests/contract/io_queue_contract.h"

namespace sluice::test {
namespace {

// Requests that say nothing of a drive go to the first; the contract holds for it as for a queue
// alone.
std::unique_ptr<IoQueue> make_three(const IoQueueOptions& options) {
  std::vector<std::unique_ptr<IoQueue>> drives;
  drives.push_back(make_thread_queue(options));
  drives.push_back(make_sync_queue(options));
  drives.push_back(make_thread_queue(options));
  return make_drive_queues(std::move(drives));
}

INSTANTIATE_TEST_SUITE_P(Drives, IoQueueContract,
                         ::testing::Values(IoQueueFactory{"drives", make_three}));

// Says which queue a request has come to.
class Recorder final : public IoQueue {
 public:
  explicit Recorder(std::vector<std::size_t>& calls, std::string_view note = {})
      : calls_(calls), note_(note) {}
  void submit(std::span<IoRequest* const> requests) override {
    calls_.push_back(requests.size());
    for (IoRequest* request : requests) {
      ++counters_.read_requests;
      counters_.retried += 100;
      request->on_complete(*request);
    }
  }
  void wait_idle() override { calls_.push_back(0); }
  IoCounters counters() const override { return counters_; }
  std::string_view name() const override { return "recorder"; }
  std::string_view note() const override { return note_; }

 private:
  std::vector<std::size_t>& calls_;
  std::string_view note_;
  IoCounters counters_;
};

TEST(DriveQueues, EachRequestGoesToItsDriveAndRunsInOnePiece) {
  std::vector<std::size_t> calls[3];
  std::vector<std::unique_ptr<IoQueue>> drives;
  drives.push_back(std::make_unique<Recorder>(calls[0]));
  drives.push_back(std::make_unique<Recorder>(calls[1], "a note"));
  drives.push_back(std::make_unique<Recorder>(calls[2]));
  const auto queue = make_drive_queues(std::move(drives));
  EXPECT_EQ(queue->name(), "recorder");
  EXPECT_EQ(queue->note(), "a note");
  std::vector<IoRequest*> requests;
  for (const std::uint32_t drive : {2u, 2u, 0u, 1u, 1u, 1u, 2u}) {
    auto* request = new IoRequest{.drive = drive};
    request->on_complete = [](IoRequest& done) { delete &done; };  // gone inside submit()
    requests.push_back(request);
  }
  queue->submit(requests);
  EXPECT_EQ(queue->counters().read_requests, 7u);
  EXPECT_EQ(queue->counters().retried, 700u);
  EXPECT_EQ(queue->drive_counters(0).read_requests, 1u);
  EXPECT_EQ(queue->drive_counters(1).read_requests, 3u);
  EXPECT_EQ(queue->drive_counters(2).read_requests, 3u);
  EXPECT_EQ(queue->drive_counters(3).read_requests, 0u);
  queue->wait_idle();
  EXPECT_EQ(calls[0], (std::vector<std::size_t>{1, 0}));
  EXPECT_EQ(calls[1], (std::vector<std::size_t>{3, 0}));
  EXPECT_EQ(calls[2], (std::vector<std::size_t>{2, 1, 0}));
}

// Wherever a queue without drives stands, the parts add up to the whole.
TEST(DriveQueues, AQueueWithoutDrivesCountsForTheFirst) {
  std::vector<std::size_t> calls;
  Recorder queue(calls);
  IoRequest request{.drive = 1};
  request.on_complete = [](IoRequest&) {};
  IoRequest* const pointer = &request;
  queue.submit({&pointer, 1});
  EXPECT_EQ(queue.drive_counters(0).read_requests, 1u);
  EXPECT_EQ(queue.drive_counters(1).read_requests, 0u);
}

// A drive that does not answer holds up no other one.
TEST(DriveQueues, ASlowDriveDoesNotHoldUpAnother) {
  std::vector<std::unique_ptr<IoQueue>> drives;
  drives.push_back(make_thread_queue({.depth = 1}));
  drives.push_back(make_thread_queue({.depth = 1}));
  const auto queue = make_drive_queues(std::move(drives));
  static std::atomic<bool> is_open;
  is_open = false;
  IoRequest slow;
  slow.on_complete = [](IoRequest&) { is_open.wait(false); };
  IoRequest* const first = &slow;
  queue->submit({&first, 1});
  std::byte byte{};
  RequestBatch quick(1);
  quick.set(0, IoKind::kRead, -1, 0, {&byte, 1});
  quick[0].drive = 1;
  for (int i = 0; i < 50; ++i) quick.submit_and_wait(*queue);
  is_open = true;
  is_open.notify_all();
  queue->wait_idle();
}

TEST(DriveQueuesDeathTest, ARequestForADriveThatIsNotThereIsAMistake) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  std::vector<std::unique_ptr<IoQueue>> drives;
  drives.push_back(make_sync_queue({}));
  const auto queue = make_drive_queues(std::move(drives));
  IoRequest request{.drive = 1};
  request.on_complete = [](IoRequest&) {};
  IoRequest* const pointer = &request;
  EXPECT_DEATH(queue->submit({&pointer, 1}), "for one of the drives");
}

}  // namespace
}  // namespace sluice::test
