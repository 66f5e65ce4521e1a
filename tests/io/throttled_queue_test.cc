#include "io/throttled_queue.h"

#include <map>
#include <string>
#include <vector>

#include "base/trace/trace_recorder.h"
#include "io/write_cache_model.h"
#include "tests/contract/io_queue_contract.h"

namespace sluice::test {
namespace {

std::unique_ptr<IoQueue> make_unlimited(const IoQueueOptions& options) {
  return make_throttled_queue(make_thread_queue(options), {});
}

std::unique_ptr<IoQueue> make_limited(const IoQueueOptions& options) {
  return make_throttled_queue(make_sync_queue(options), {.read_bytes_per_second = 2'000'000'000,
                                                         .write_bytes_per_second = 4'000'000'000,
                                                         .duplex = Duplex::kHalf,
                                                         .latency_ns = 20'000});
}

INSTANTIATE_TEST_SUITE_P(Throttled, IoQueueContract,
                         ::testing::Values(IoQueueFactory{"unlimited", make_unlimited},
                                           IoQueueFactory{"limited", make_limited}));

// The names of requests in the order in which they completed. Times are computed, so that this
// order does not depend on when a thread wakes up.
class ThrottledQueueOrder : public ::testing::Test {
 protected:
  struct Named {
    IoRequest request;
    ThrottledQueueOrder* test = nullptr;
    char name = 0;
  };

  // One submission: 'R' and 'W' for a read or a write of 10 KB, 'F' for a flush.
  std::string completions(const std::string& requests, const ThrottleOptions& options) {
    const auto queue = make_throttled_queue(make_sync_queue({}), options);
    std::vector<Named> all(requests.size());
    std::vector<IoRequest*> pointers;
    for (std::size_t i = 0; i < all.size(); ++i) {
      Named& named = all[i];
      named.test = this;
      const char kind = requests[i];
      const char first = kind == 'R' ? 'a' : kind == 'W' ? 'A' : '1';
      named.name = static_cast<char>(first + counts_[kind]++);
      named.request = {.kind = kind == 'R'   ? IoKind::kRead
                               : kind == 'W' ? IoKind::kWrite
                                             : IoKind::kFlush,
                       .descriptor = file_.get(),
                       .offset_bytes = i * kBytes,
                       .data = data_.data() + i * kBytes,
                       .length_bytes = kind == 'F' ? 0 : kBytes,
                       .on_complete =
                           [](IoRequest& done) {
                             auto* ended = static_cast<Named*>(done.context);
                             EXPECT_EQ(done.error, 0);
                             ended->test->order_ += ended->name;
                             ended->test->ended_ns_.push_back(steady_now_ns());
                           },
                       .context = &named};
      pointers.push_back(&named.request);
    }
    begin_ns_ = steady_now_ns();
    queue->submit(pointers);
    queue->wait_idle();
    return order_;
  }

  static constexpr std::uint64_t kBytes = 10'000;  // 10 ms at 1 MB/s

  TempDirectory directory_;
  UniqueFd file_{::open(directory_.file("plain").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)};
  std::vector<std::byte> data_ = std::vector<std::byte>(32 * kBytes);
  std::map<char, int> counts_;
  std::string order_;
  std::uint64_t begin_ns_ = 0;
  std::vector<std::uint64_t> ended_ns_;

  void SetUp() override {
    ASSERT_EQ(::ftruncate(file_.get(), static_cast<off_t>(data_.size())), 0);
  }
};

// Reads end at 10, 20 and 30 ms, writes at 4, 8 ... 28 ms.
TEST_F(ThrottledQueueOrder, DirectionsHaveRatesOfTheirOwn) {
  EXPECT_EQ(completions("RRRWWWWWWW",
                        {.read_bytes_per_second = 1'000'000, .write_bytes_per_second = 2'500'000}),
            "ABaCDbEFGc" /* 4 8 10 12 16 20 20 24 28 30 */);
}

TEST_F(ThrottledQueueOrder, HalfDuplexServesInOrderOfArrival) {
  EXPECT_EQ(completions("RWWRWR", {.read_bytes_per_second = 1'000'000,
                                   .write_bytes_per_second = 4'000'000,
                                   .duplex = Duplex::kHalf}),
            "aABbCc");
}

// Both reads are due at 10 ms, the writes at 15 and 20; were latencies to add up, the second read
// would come after the first write.
TEST_F(ThrottledQueueOrder, LatencyOverlaps) {
  EXPECT_EQ(completions("RRWW", {.write_bytes_per_second = 2'000'000, .latency_ns = 10'000'000}),
            "abAB");
}

// Writes end at 5 and 22 ms, the flush between them at 17, reads at 10 and 20: a flush holds up the
// writes behind it, and reads only where the drive does one thing at a time.
TEST_F(ThrottledQueueOrder, AFlushTakesItsTurnAmongTheWrites) {
  const ThrottleOptions both{.read_bytes_per_second = 1'000'000,
                             .write_bytes_per_second = 2'000'000,
                             .flush_ns = 12'000'000};
  EXPECT_EQ(completions("WFWRR", both), "Aa1bB");
  order_.clear();
  counts_.clear();
  ThrottleOptions half = both;
  half.duplex = Duplex::kHalf;
  EXPECT_EQ(completions("WFRW", half), "A1aB");
}

// Two writes go to the cache at once. The third one finds it full: the drive makes room from 10 to
// 20 ms. Reads end at 10 and 30, and the flush at 55, behind the 20 KB in the cache.
TEST_F(ThrottledQueueOrder, WritesLandInACacheUntilItIsFull) {
  EXPECT_EQ(completions("RWWWRF", {.read_bytes_per_second = 1'000'000,
                                   .write_bytes_per_second = 1'000'000,
                                   .duplex = Duplex::kHalf,
                                   .flush_ns = 5'000'000,
                                   .write_cache_bytes = 2 * kBytes}),
            "ABaCb1");
  EXPECT_GE(ended_ns_.back(), begin_ns_ + 55'000'000);
}

// 100 bytes at 10 bytes a second, as in io/write_cache_model.h.
TEST(WriteCacheModel, CountsWhatItHolds) {
  constexpr std::uint64_t kSecond = 1'000'000'000;
  WriteCacheModel cache(100, 10);
  EXPECT_TRUE(cache.exists());
  EXPECT_FALSE(WriteCacheModel(0, 10).exists());
  EXPECT_TRUE(cache.take(60));
  EXPECT_EQ(cache.idle(2 * kSecond), 2 * kSecond);  // 40 left
  EXPECT_TRUE(cache.take(60));
  EXPECT_FALSE(cache.take(20));
  EXPECT_FALSE(cache.take(0));                  // it came later
  EXPECT_EQ(cache.make_room(20), 2 * kSecond);  // 100 again
  EXPECT_EQ(cache.make_room(0), 0u);
  EXPECT_EQ(cache.idle(3 * kSecond), 3 * kSecond);
  EXPECT_TRUE(cache.take(10));
  EXPECT_EQ(cache.empty(), 8 * kSecond);
  EXPECT_EQ(cache.idle(kSecond), 0u);
  EXPECT_FALSE(cache.take(250));  // more than fits
  EXPECT_EQ(cache.make_room(250), 15 * kSecond);
  EXPECT_EQ(cache.idle(20 * kSecond), 10 * kSecond);
  EXPECT_EQ(cache.empty(), 0u);
}

TEST_F(ThrottledQueueOrder, NothingEndsBeforeItsTime) {
  completions("RRWR", {.read_bytes_per_second = 1'000'000,
                       .write_bytes_per_second = 2'000'000,
                       .duplex = Duplex::kHalf,
                       .latency_ns = 1'000'000});
  const std::uint64_t due_ms[] = {11, 21, 26, 36};
  ASSERT_EQ(ended_ns_.size(), 4u);
  for (int i = 0; i < 4; ++i) EXPECT_GE(ended_ns_[i], begin_ns_ + due_ms[i] * 1'000'000);
}

TEST(ThrottledQueue, PassesOnWhatTheDriveSays) {
  const auto queue = make_throttled_queue(make_sync_queue({}), {.latency_ns = 1});
  EXPECT_EQ(queue->name(), "sync");
  EXPECT_EQ(queue->late_ns(), 0u);
  std::byte data{};
  RequestBatch batch(1);
  batch.set(0, IoKind::kWrite, -1, 0, {&data, 1});
  batch.submit_and_wait(*queue);
  EXPECT_EQ(batch[0].error, EBADF);
  EXPECT_EQ(queue->counters().failed, 1u);
}

// The real drive takes its time, whatever the emulated one would do.
TEST(ThrottledQueue, CountsHowLateTheDriveIs) {
  const auto queue = make_throttled_queue(
      make_throttled_queue(make_sync_queue({}), {.latency_ns = 5'000'000}), {.latency_ns = 1});
  std::byte data{};
  RequestBatch batch(1);
  batch.set(0, IoKind::kRead, -1, 0, {&data, 1});
  batch.submit_and_wait(*queue);
  EXPECT_GE(queue->late_ns(), 4'000'000u);
}

TEST(ThrottledQueue, RefusesRatesThatLookLikeAHang) {
  for (const ThrottleOptions options : {ThrottleOptions{.read_bytes_per_second = 999'999},
                                        ThrottleOptions{.write_bytes_per_second = 999'999}}) {
    const std::string message = expect_error(ErrorCode::kInvalidArgument, [&] {
      (void)make_throttled_queue(make_sync_queue({}), options);
    });
    EXPECT_NE(message.find("999999"), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace sluice::test
