// These cases test the part of the IoQueue contract that is about flushes. This file is a part of
// io_queue_contract.h. A program cannot see which data is durable. So only a refusal by the kernel
// shows that a flush has reached the kernel.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <vector>

#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "io/direct_file.h"
#include "tests/contract/io_queue_fixture.h"
#include "tests/support/request_batch.h"

namespace sluice::test {

TEST_P(IoQueueContract, AFlushEndsWithoutBytesAndIsCounted) {
  const DirectFile file = DirectFile::create_scratch(directory_.path(), 64_KiB);
  AlignedBuffer data(64_KiB, "test");
  const auto queue = make_queue();
  RequestBatch write(1);
  write.set(0, IoKind::kWrite, file.descriptor(), 0, data.span());
  write.submit_and_wait(*queue);
  RequestBatch flush(1);
  flush.set(0, IoKind::kFlush, file.descriptor(), 0, {});
  flush.submit_and_wait(*queue);
  EXPECT_EQ(flush[0].error, 0);
  EXPECT_EQ(flush[0].transferred_bytes, 0u);
  EXPECT_EQ(flush.completions_of(0), 1u);
  EXPECT_NE(flush[0].started_ns, 0u);
  EXPECT_GE(flush[0].moved_ns, flush[0].started_ns);
  const IoCounters counters = queue->counters();
  EXPECT_EQ(counters.flush_requests, 1u);
  EXPECT_EQ(counters.write_requests, 1u);
  EXPECT_EQ(counters.write_bytes, 64_KiB);
  EXPECT_EQ(counters.read_requests, 0u);
}

// A pipe can be written to, but cannot be flushed.
TEST_P(IoQueueContract, AFlushThatTheKernelRefusesFailsOnce) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd read_end(ends[0]);
  const UniqueFd write_end(ends[1]);
  const UniqueFd file = open_plain(4096);
  const auto queue = make_queue();
  RequestBatch batch(3);
  batch.set(0, IoKind::kFlush, write_end.get(), 0, {});
  batch.set(1, IoKind::kFlush, -1, 0, {});
  batch.set(2, IoKind::kFlush, file.get(), 0, {});
  batch.submit_and_wait(*queue);
  EXPECT_EQ(batch[0].error, EINVAL);
  EXPECT_EQ(batch[1].error, EBADF);
  EXPECT_EQ(batch[2].error, 0);
  EXPECT_EQ(queue->counters().failed, 2u);
  EXPECT_EQ(queue->counters().retried, 0u);
  EXPECT_EQ(queue->counters().flush_requests, 1u);
}

// The case submits flushes between transfers. There are more requests than the queue's depth. Each
// request ends once, and no byte is lost.
TEST_P(IoQueueContract, FlushesAndTransfersGoSideBySide) {
  constexpr std::size_t kRequests = 60;
  const UniqueFd file = open_plain(kRequests);
  std::vector<std::byte> data(kRequests);
  for (std::size_t i = 0; i < kRequests; ++i) data[i] = static_cast<std::byte>(i + 1);
  const auto queue = make_queue(3);
  RequestBatch batch(kRequests);
  for (std::size_t i = 0; i < kRequests; ++i) {
    if (i % 3 == 2) {
      batch.set(i, IoKind::kFlush, file.get(), 0, {});
    } else {
      batch.set(i, IoKind::kWrite, file.get(), i, std::span(data).subspan(i, 1));
    }
  }
  batch.submit_and_wait(*queue);
  for (std::size_t i = 0; i < kRequests; ++i) {
    ASSERT_EQ(batch[i].error, 0) << i;
    ASSERT_EQ(batch.completions_of(i), 1u);
    std::byte found{};
    ASSERT_EQ(::pread(file.get(), &found, 1, static_cast<off_t>(i)), 1);
    ASSERT_EQ(found, i % 3 == 2 ? std::byte{0} : data[i]) << i;
  }
}

}  // namespace sluice::test
