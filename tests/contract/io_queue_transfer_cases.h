// The IoQueue contract's test cases for transfers. The cases test where a transfer puts its bytes,
// and how a transfer ends. This file is a part of io_queue_contract.h.
#pragma once

#include <sys/mman.h>
#include <sys/resource.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "io/direct_file.h"
#include "tests/contract/io_queue_fixture.h"
#include "tests/support/request_batch.h"

namespace sluice::test {

// The case makes many random reads and writes of a scratch file at the same time, and compares the
// results with a copy in memory. Requests of one round touch different blocks, because the queue
// promises no order.
TEST_P(IoQueueContract, RandomDirectTransfersKeepEveryByte) {
  constexpr std::uint64_t kBlocks = 48;
  constexpr std::uint64_t kBlockBytes = 64_KiB;
  const DirectFile file = DirectFile::create_scratch(directory_.path(), kBlocks * kBlockBytes);
  const std::uint64_t alignment = file.alignment_bytes();
  AlignedBuffer arena(kBlocks * kBlockBytes, "test");
  std::vector<std::byte> model(kBlocks * kBlockBytes);  // a preallocated file reads as zeros
  std::vector<std::uint64_t> order(kBlocks);
  std::iota(order.begin(), order.end(), 0u);
  const auto queue = make_queue();
  std::mt19937_64 random(1);
  for (int round = 0; round < 20; ++round) {
    std::ranges::shuffle(order, random);
    RequestBatch batch(kBlocks);
    for (std::size_t i = 0; i < kBlocks; ++i) {
      const std::uint64_t units = kBlockBytes / alignment;
      const std::uint64_t skip = random() % units;
      const std::uint64_t offset = order[i] * kBlockBytes + skip * alignment;
      const std::uint64_t length = (1 + random() % (units - skip)) * alignment;
      const auto data = arena.span().subspan(i * kBlockBytes, length);
      fill_random(data, random);
      const bool is_write = random() % 2 == 0;
      if (is_write) std::memcpy(model.data() + offset, data.data(), length);
      batch.set(i, is_write ? IoKind::kWrite : IoKind::kRead, file.descriptor(), offset, data);
    }
    batch.submit_and_wait(*queue);
    for (std::size_t i = 0; i < kBlocks; ++i) {
      const IoRequest& request = batch[i];
      ASSERT_EQ(request.error, 0) << "round " << round << " request " << i;
      ASSERT_EQ(request.transferred_bytes, request.length_bytes);
      ASSERT_EQ(batch.completions_of(i), 1u);
      ASSERT_TRUE(equal({request.data, request.length_bytes},
                        std::span(model).subspan(request.offset_bytes, request.length_bytes)))
          << "round " << round << " request " << i;
    }
  }
}

// Pieces have random offsets and lengths. The pieces for writing and the pieces for reading are cut
// at different offsets.
TEST_P(IoQueueContract, UnalignedTransfersThroughThePageCacheKeepEveryByte) {
  constexpr std::uint64_t kFileBytes = 300'001;
  const UniqueFd file = open_plain(kFileBytes);
  std::mt19937_64 random(2);
  std::vector<std::byte> written(kFileBytes);
  std::vector<std::byte> read(kFileBytes);
  fill_random(written, random);
  const auto queue = make_queue();
  for (const IoKind kind : {IoKind::kWrite, IoKind::kRead}) {
    std::vector<std::uint64_t> cuts{0, kFileBytes};
    for (int i = 0; i < 200; ++i) cuts.push_back(random() % kFileBytes);
    std::ranges::sort(cuts);
    RequestBatch batch(cuts.size() - 1);
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
      batch.set(i, kind, file.get(), cuts[i],
                std::span(kind == IoKind::kWrite ? written : read)
                    .subspan(cuts[i], cuts[i + 1] - cuts[i]));
    }
    batch.submit_and_wait(*queue);
    for (std::size_t i = 0; i < batch.size(); ++i) ASSERT_EQ(batch[i].error, 0) << i;
  }
  EXPECT_TRUE(equal(read, written));
}

TEST_P(IoQueueContract, TakesMoreRequestsThanItsDepth) {
  constexpr std::size_t kRequests = 500;
  const UniqueFd file = open_plain(kRequests);
  std::vector<std::byte> data(kRequests, std::byte{1});
  for (const std::uint32_t depth : {1u, 3u, 4096u}) {
    const auto queue = make_queue(depth);
    RequestBatch batch(kRequests);
    for (std::size_t i = 0; i < kRequests; ++i)
      batch.set(i, IoKind::kRead, file.get(), i, std::span(data).subspan(i, 1));
    batch.submit_and_wait(*queue);
    for (std::size_t i = 0; i < kRequests; ++i) {
      ASSERT_EQ(batch.completions_of(i), 1u);
      ASSERT_EQ(batch[i].error, 0);
      ASSERT_EQ(data[i], std::byte{0});
    }
  }
}

TEST_P(IoQueueContract, SubmitsFromSeveralThreads) {
  constexpr std::size_t kThreads = 4;
  constexpr std::size_t kRequests = 64;
  constexpr std::uint64_t kPieceBytes = 777;
  const UniqueFd file = open_plain(kThreads * kRequests * kPieceBytes);
  const auto queue = make_queue(3);
  const auto run = [&](std::size_t thread) {
    std::mt19937_64 random(thread);
    std::vector<std::byte> written(kRequests * kPieceBytes);
    std::vector<std::byte> read(written.size());
    fill_random(written, random);
    for (auto* data : {&written, &read}) {
      RequestBatch batch(kRequests);
      for (std::size_t i = 0; i < kRequests; ++i) {
        batch.set(i, data == &written ? IoKind::kWrite : IoKind::kRead, file.get(),
                  (i * kThreads + thread) * kPieceBytes,
                  std::span(*data).subspan(i * kPieceBytes, kPieceBytes));
        if (i % 2 == 1) queue->submit(batch.pointers().subspan(i - 1, 2));
      }
      batch.wait();
      for (std::size_t i = 0; i < kRequests; ++i) EXPECT_EQ(batch.completions_of(i), 1u);
    }
    EXPECT_TRUE(equal(read, written));
  };
  std::vector<std::thread> threads;
  for (std::size_t thread = 0; thread < kThreads; ++thread) threads.emplace_back(run, thread);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(queue->counters().write_requests, kThreads * kRequests);
  EXPECT_EQ(queue->counters().read_requests, kThreads * kRequests);
}

TEST_P(IoQueueContract, FailuresNameTheirErrnoAndLeaveOthersAlone) {
  const UniqueFd file = open_plain(10'000);
  const UniqueFd read_only = open_plain(10'000, O_RDONLY);
  std::vector<std::byte> data(9 * 4096, std::byte{1});
  const auto piece = [&](std::size_t i, std::size_t length) {
    return std::span(data).subspan(i * 4096, length);
  };
  const auto queue = make_queue(4);
  RequestBatch batch(6);
  batch.set(0, IoKind::kRead, file.get(), 0, piece(0, 4096));
  batch.set(1, IoKind::kRead, -1, 0, piece(1, 4096));               // no file
  batch.set(2, IoKind::kRead, file.get(), 20'000, piece(2, 4096));  // beyond the end
  batch.set(3, IoKind::kRead, file.get(), 4096, piece(3, 8192));    // across the end
  batch.set(4, IoKind::kWrite, read_only.get(), 0, piece(5, 4096));
  batch.set(5, IoKind::kRead, file.get(), 4096, piece(6, 4096));
  batch.submit_and_wait(*queue);
  const int expected[] = {0, EBADF, EIO, EIO, EBADF, 0};
  for (std::size_t i = 0; i < batch.size(); ++i) EXPECT_EQ(batch[i].error, expected[i]) << i;
  EXPECT_EQ(batch[2].transferred_bytes, 0u);
  EXPECT_EQ(batch[3].transferred_bytes, 10'000u - 4096u);
  EXPECT_TRUE(std::ranges::all_of(piece(0, 4096), [](std::byte b) { return b == std::byte{0}; }));
  EXPECT_TRUE(std::ranges::all_of(piece(6, 4096), [](std::byte b) { return b == std::byte{0}; }));
  const IoCounters counters = queue->counters();
  EXPECT_EQ(counters.failed, 4u);
  EXPECT_EQ(counters.read_requests, 2u);
  EXPECT_EQ(counters.read_bytes, 8192u);
  EXPECT_EQ(counters.write_requests, 0u);
}

// A test can force only one kind of short write: the kernel stops a write at the limit of the file
// size. If the limit is at the end of a page, the kernel answers the resumed write with an errno.
// If the limit is inside a page, the resumed write makes no progress, and the queue gives up.
TEST_P(IoQueueContract, ShortWriteIsResumed) {
  struct Case {
    std::uint64_t limit_bytes;
    int error;
  };
  for (const Case& expected : {Case{8192, EFBIG}, Case{10'000, EIO}}) {
    const UniqueFd file = open_plain(0);
    std::vector<std::byte> data(16384, std::byte{7});
    RequestBatch batch(1);
    batch.set(0, IoKind::kWrite, file.get(), 0, data);
    const auto queue = make_queue();
    const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
    rlimit old_limit{};
    ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old_limit), 0);
    const rlimit limit{.rlim_cur = expected.limit_bytes, .rlim_max = old_limit.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    batch.submit_and_wait(*queue);
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old_limit), 0);
    std::signal(SIGXFSZ, old_handler);
    EXPECT_EQ(batch[0].transferred_bytes, expected.limit_bytes);
    EXPECT_EQ(batch[0].error, expected.error);
    EXPECT_EQ(queue->counters().resumed, 1u);
    EXPECT_EQ(queue->counters().retried, expected.error == EIO ? 16u : 0u);
  }
}

// The lengths of these transfers need more than 32 bits. No pages are allocated for the memory of
// the transfers. /dev/null accepts such transfers, because /dev/null does not read the memory.
TEST_P(IoQueueContract, LargeTransfersMoveWholly) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer would look at all 5 GiB";
#endif
  constexpr std::uint64_t kLengthBytes = 5_GiB + 4096;
  void* memory =
      ::mmap(nullptr, kLengthBytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no address space of 5 GiB: " << errno_text(errno);
  const UniqueFd null(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  ASSERT_TRUE(null);
  const auto queue = make_queue();
  RequestBatch batch(1);
  batch.set(0, IoKind::kWrite, null.get(), 0, {static_cast<std::byte*>(memory), kLengthBytes});
  batch.submit_and_wait(*queue);
  ::munmap(memory, kLengthBytes);
  EXPECT_EQ(batch[0].error, 0);
  EXPECT_EQ(batch[0].transferred_bytes, kLengthBytes);
  EXPECT_EQ(queue->counters().write_bytes, kLengthBytes);
  EXPECT_EQ(queue->counters().resumed, 5u);
}

}  // namespace sluice::test
