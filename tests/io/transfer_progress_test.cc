#include "io/transfer_progress.h"

#include <cerrno>
#include <limits>

#include <gtest/gtest.h>

namespace sluice {
namespace {

IoRequest make_request(IoKind kind, std::uint64_t length_bytes) {
  static std::byte data[1];  // never touched: the rules only count
  IoRequest request;
  request.kind = kind;
  request.offset_bytes = 512;
  request.data = data;
  request.length_bytes = length_bytes;
  request.on_complete = [](IoRequest&) {};
  begin_transfer(request);
  return request;
}

class TransferProgress : public ::testing::TestWithParam<IoKind> {
 protected:
  IoRequest request(std::uint64_t length_bytes) { return make_request(GetParam(), length_bytes); }
};

TEST_P(TransferProgress, WholeTransferEnds) {
  IoRequest whole = request(16384);
  EXPECT_EQ(next_attempt(whole).length_bytes, 16384u);
  EXPECT_EQ(advance_transfer(whole, 16384), TransferStep::kEnded);
  EXPECT_EQ(whole.error, 0);
  EXPECT_EQ(whole.transferred_bytes, 16384u);
}

TEST_P(TransferProgress, EmptyTransferEnds) {
  IoRequest empty = request(0);
  EXPECT_EQ(next_attempt(empty).length_bytes, 0u);
  EXPECT_EQ(advance_transfer(empty, 0), TransferStep::kEnded);
  EXPECT_EQ(empty.error, 0);
}

TEST_P(TransferProgress, ShortTransferResumesBehindWholePages) {
  IoRequest cut = request(16384);
  EXPECT_EQ(advance_transfer(cut, 8192), TransferStep::kResume);
  const TransferAttempt rest = next_attempt(cut);
  EXPECT_EQ(rest.offset_bytes, 512u + 8192u);
  EXPECT_EQ(rest.data, cut.data + 8192);
  EXPECT_EQ(rest.length_bytes, 8192u);
  EXPECT_EQ(advance_transfer(cut, 8192), TransferStep::kEnded);
  EXPECT_EQ(cut.transferred_bytes, 16384u);
}

TEST_P(TransferProgress, ShortTransferInsideAPageMovesThatPageAgain) {
  IoRequest cut = request(16384);
  EXPECT_EQ(advance_transfer(cut, 5000), TransferStep::kResume);
  EXPECT_EQ(cut.transferred_bytes, 5000u);
  const TransferAttempt rest = next_attempt(cut);
  EXPECT_EQ(rest.offset_bytes, 512u + 4096u);
  EXPECT_EQ(rest.data, cut.data + 4096);
  EXPECT_EQ(rest.length_bytes, 12288u);
  EXPECT_EQ(advance_transfer(cut, 12288), TransferStep::kEnded);
  EXPECT_EQ(cut.transferred_bytes, 16384u);
}

TEST_P(TransferProgress, SlowProgressIsNoRetry) {
  IoRequest slow = request(64 * 4096);
  for (int page = 1; page < 64; ++page) {
    ASSERT_EQ(advance_transfer(slow, 4096), TransferStep::kResume) << page;
    ASSERT_EQ(slow.attempts, 0u);
  }
  EXPECT_EQ(advance_transfer(slow, 4096), TransferStep::kEnded);
  EXPECT_EQ(slow.error, 0);
}

TEST_P(TransferProgress, NoFurtherThanBeforeIsRetriedABoundedNumberOfTimes) {
  IoRequest stuck = request(16384);
  EXPECT_EQ(advance_transfer(stuck, 5000), TransferStep::kResume);
  for (std::uint32_t retry = 0; retry < kRetriesMax; ++retry) {
    // 4096 settled bytes and 904 again are 5000; the shorter ones do not even get there.
    ASSERT_EQ(advance_transfer(stuck, 904 - retry), TransferStep::kRetry) << retry;
    ASSERT_EQ(stuck.transferred_bytes, 5000u);
  }
  EXPECT_EQ(advance_transfer(stuck, 904), TransferStep::kEnded);
  EXPECT_EQ(stuck.error, EIO);
  EXPECT_EQ(stuck.transferred_bytes, 5000u);
}

TEST_P(TransferProgress, InterruptionsAreRetriedABoundedNumberOfTimes) {
  for (const int error : {EINTR, EAGAIN, ECANCELED}) {
    IoRequest interrupted = request(4096);
    for (std::uint32_t retry = 0; retry < kRetriesMax; ++retry)
      ASSERT_EQ(advance_transfer(interrupted, -error), TransferStep::kRetry) << retry;
    EXPECT_EQ(advance_transfer(interrupted, -error), TransferStep::kEnded);
    EXPECT_EQ(interrupted.error, error);
    EXPECT_EQ(interrupted.transferred_bytes, 0u);
  }
}

TEST_P(TransferProgress, ProgressGrantsNewRetries) {
  IoRequest request = this->request(8192);
  for (std::uint32_t retry = 0; retry < kRetriesMax; ++retry)
    ASSERT_EQ(advance_transfer(request, -EINTR), TransferStep::kRetry);
  EXPECT_EQ(advance_transfer(request, 4096), TransferStep::kResume);
  for (std::uint32_t retry = 0; retry < kRetriesMax; ++retry)
    ASSERT_EQ(advance_transfer(request, -EAGAIN), TransferStep::kRetry);
  EXPECT_EQ(advance_transfer(request, 4096), TransferStep::kEnded);
  EXPECT_EQ(request.error, 0);
}

TEST_P(TransferProgress, OtherErrorsEnd) {
  for (const int error : {EIO, ENOSPC, EBADF, EINVAL, ENXIO}) {
    IoRequest failed = request(8192);
    EXPECT_EQ(advance_transfer(failed, 4096), TransferStep::kResume);
    EXPECT_EQ(advance_transfer(failed, -error), TransferStep::kEnded);
    EXPECT_EQ(failed.error, error);
    EXPECT_EQ(failed.transferred_bytes, 4096u);
  }
}

TEST_P(TransferProgress, LargeTransfersGoInAttempts) {
  IoRequest large = request(5 * kAttemptBytesMax + 4096);
  for (int i = 0; i < 5; ++i) {
    ASSERT_EQ(next_attempt(large).length_bytes, kAttemptBytesMax);
    ASSERT_EQ(advance_transfer(large, kAttemptBytesMax), TransferStep::kResume);
  }
  EXPECT_EQ(next_attempt(large).length_bytes, 4096u);
  EXPECT_EQ(advance_transfer(large, 4096), TransferStep::kEnded);
  EXPECT_EQ(large.transferred_bytes, large.length_bytes);
}

TEST_P(TransferProgress, BeginForgetsTheResultsBefore) {
  IoRequest used = request(8192);
  EXPECT_EQ(advance_transfer(used, 4096), TransferStep::kResume);
  EXPECT_EQ(advance_transfer(used, -EINTR), TransferStep::kRetry);
  EXPECT_EQ(advance_transfer(used, -EIO), TransferStep::kEnded);
  used.started_ns = 17;  // as a queue notes them
  used.moved_ns = 18;
  begin_transfer(used);
  EXPECT_EQ(used.started_ns, 0u);
  EXPECT_EQ(used.moved_ns, 0u);
  EXPECT_EQ(used.error, 0);
  EXPECT_EQ(used.transferred_bytes, 0u);
  EXPECT_EQ(used.attempts, 0u);
  EXPECT_EQ(next_attempt(used).length_bytes, 8192u);
}

INSTANTIATE_TEST_SUITE_P(BothKinds, TransferProgress,
                         ::testing::Values(IoKind::kRead, IoKind::kWrite), [](const auto& kind) {
                           return kind.param == IoKind::kRead ? "read" : "write";
                         });

TEST(TransferProgressOfReads, EndOfFileIsEIO) {
  IoRequest at_start = make_request(IoKind::kRead, 4096);
  EXPECT_EQ(advance_transfer(at_start, 0), TransferStep::kEnded);
  EXPECT_EQ(at_start.error, EIO);

  IoRequest in_the_middle = make_request(IoKind::kRead, 8192);
  EXPECT_EQ(advance_transfer(in_the_middle, 4096), TransferStep::kResume);
  EXPECT_EQ(advance_transfer(in_the_middle, 0), TransferStep::kEnded);
  EXPECT_EQ(in_the_middle.error, EIO);
  EXPECT_EQ(in_the_middle.transferred_bytes, 4096u);
}

TEST(TransferProgressOfWrites, NothingWrittenIsRetriedThenEIO) {
  IoRequest stuck = make_request(IoKind::kWrite, 4096);
  for (std::uint32_t retry = 0; retry < kRetriesMax; ++retry)
    ASSERT_EQ(advance_transfer(stuck, 0), TransferStep::kRetry);
  EXPECT_EQ(advance_transfer(stuck, 0), TransferStep::kEnded);
  EXPECT_EQ(stuck.error, EIO);
}

TEST(TransferProgressOfFlushes, EndWithoutBytesAndAreNotTriedAgainAfterAnError) {
  IoRequest flush = make_request(IoKind::kFlush, 0);
  EXPECT_EQ(next_attempt(flush).length_bytes, 0u);
  EXPECT_EQ(advance_transfer(flush, -EINTR), TransferStep::kRetry);
  EXPECT_EQ(advance_transfer(flush, 0), TransferStep::kEnded);
  EXPECT_EQ(flush.error, 0);

  IoRequest lost = make_request(IoKind::kFlush, 0);
  EXPECT_EQ(advance_transfer(lost, -EIO), TransferStep::kEnded);
  EXPECT_EQ(lost.error, EIO);
}

TEST(TransferProgressDeathTest, ProgrammerErrorsAbort) {
  IoRequest request = make_request(IoKind::kRead, 4096);
  EXPECT_DEATH((void)advance_transfer(request, 4097), "more bytes than it was asked for");

  IoRequest without_callback = request;
  without_callback.on_complete = nullptr;
  EXPECT_DEATH(begin_transfer(without_callback), "needs on_complete");

  IoRequest without_data = request;
  without_data.data = nullptr;
  EXPECT_DEATH(begin_transfer(without_data), "needs data");

  IoRequest too_far = request;
  too_far.offset_bytes = std::numeric_limits<std::uint64_t>::max();
  EXPECT_DEATH(begin_transfer(too_far), "below 2\\^63");
  too_far.offset_bytes = std::numeric_limits<std::int64_t>::max() - 4095;
  EXPECT_DEATH(begin_transfer(too_far), "below 2\\^63");
  too_far.offset_bytes -= 1;
  begin_transfer(too_far);
}

}  // namespace
}  // namespace sluice
