// These cases test the parts of the IoQueue contract that are about requests and about the queue
// itself. The cases test empty requests, waits for requests, freed requests, the destruction of the
// queue, counters and limits. This file is a part of io_queue_contract.h.
#pragma once

#include <atomic>
#include <cerrno>
#include <thread>
#include <vector>

#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "io/direct_file.h"
#include "tests/contract/io_queue_fixture.h"
#include "tests/support/expect_error.h"
#include "tests/support/request_batch.h"

namespace sluice::test {

TEST_P(IoQueueContract, NothingToDoIsDone) {
  const UniqueFd file = open_plain(0);
  const auto queue = make_queue();
  queue->wait_idle();
  queue->submit({});
  queue->wait_idle();
  RequestBatch batch(2);
  batch.set(0, IoKind::kRead, file.get(), 0, {});
  batch.set(1, IoKind::kWrite, file.get(), 0, {});
  batch.submit_and_wait(*queue);
  EXPECT_EQ(batch[0].error, 0);
  EXPECT_EQ(batch[1].error, 0);
  EXPECT_EQ(queue->counters().read_requests, 1u);
  EXPECT_EQ(queue->counters().write_requests, 1u);
}

TEST_P(IoQueueContract, CallbackMayFreeTheRequest) {
  const UniqueFd file = open_plain(4096);
  static std::byte data[64];
  static std::atomic<int> freed;
  freed = 0;
  const auto queue = make_queue(4);
  for (int i = 0; i < 64; ++i) {
    auto* request = new IoRequest{
        .descriptor = i % 2 == 0 ? file.get() : -1, .data = &data[i], .length_bytes = 1};
    request->on_complete = [](IoRequest& done) {
      EXPECT_EQ(done.transferred_bytes, done.error == 0 ? 1u : 0u);
      delete &done;
      ++freed;
    };
    queue->submit({&request, 1});
  }
  queue->wait_idle();
  EXPECT_EQ(freed, 64);
}

TEST_P(IoQueueContract, RequestMayBeUsedAgain) {
  const UniqueFd file = open_plain(100);
  std::vector<std::byte> data(100);
  const auto queue = make_queue();
  RequestBatch batch(1);
  batch.set(0, IoKind::kRead, -1, 0, data);
  batch.submit_and_wait(*queue);
  EXPECT_EQ(batch[0].error, EBADF);
  batch[0].descriptor = file.get();
  batch.submit_and_wait(*queue);
  EXPECT_EQ(batch[0].error, 0);
  EXPECT_EQ(batch[0].transferred_bytes, 100u);
  EXPECT_EQ(batch.completions_of(0), 2u);
}

TEST_P(IoQueueContract, WaitIdleReturnsAfterTheCallbacksHave) {
  const UniqueFd file = open_plain(4096);
  std::vector<std::byte> data(4096);
  static std::atomic<int> returned;
  const auto queue = make_queue(4);
  for (int round = 0; round < 50; ++round) {
    returned = 0;
    std::vector<IoRequest> requests(8);
    std::vector<IoRequest*> pointers;
    for (IoRequest& request : requests) {
      request.descriptor = file.get();
      request.data = data.data() + pointers.size();
      request.length_bytes = 1;
      request.on_complete = [](IoRequest&) {
        std::this_thread::yield();
        ++returned;
      };
      pointers.push_back(&request);
    }
    queue->submit(pointers);
    queue->wait_idle();
    ASSERT_EQ(returned, 8);
  }
}

// Two threads keep the queue busy without a pause. wait_idle() waits only for the requests that
// were submitted before the call of wait_idle().
TEST_P(IoQueueContract, WaitIdleIsNotStarvedByOthers) {
  const UniqueFd file = open_plain(4096);
  const auto queue = make_queue(4);
  std::atomic<bool> stop = false;
  const auto keep_busy = [&] {
    std::vector<std::byte> data(2);
    RequestBatch batches[2] = {RequestBatch(1), RequestBatch(1)};
    for (std::size_t i = 0; i < 2; ++i) {
      batches[i].set(0, IoKind::kRead, file.get(), 0, std::span(data).subspan(i, 1));
      queue->submit(batches[i].pointers());
    }
    std::size_t rounds = 1;
    for (; !stop; ++rounds) {
      for (RequestBatch& batch : batches) {
        batch.wait(rounds);
        queue->submit(batch.pointers());
      }
    }
    for (RequestBatch& batch : batches) batch.wait(rounds);
  };
  std::thread first(keep_busy);
  std::thread second(keep_busy);
  for (int i = 0; i < 100; ++i) queue->wait_idle();
  stop = true;
  first.join();
  second.join();
  queue->wait_idle();
}

TEST_P(IoQueueContract, DestructionCompletesWhatIsInFlight) {
  constexpr std::size_t kRequests = 64;
  const DirectFile file = DirectFile::create_scratch(directory_.path(), kRequests * 64_KiB);
  AlignedBuffer arena(kRequests * 64_KiB, "test");
  for (const std::uint32_t depth : {1u, 64u}) {
    RequestBatch batch(kRequests);
    for (std::size_t i = 0; i < kRequests; ++i) {
      batch.set(i, IoKind::kWrite, file.descriptor(), i * 64_KiB,
                arena.span().subspan(i * 64_KiB, 64_KiB));
    }
    auto queue = make_queue(depth);
    queue->submit(batch.pointers());
    queue.reset();
    EXPECT_EQ(batch.completion_count(), kRequests);
    for (std::size_t i = 0; i < kRequests; ++i) EXPECT_EQ(batch[i].error, 0);
  }
}

TEST_P(IoQueueContract, CountersTellWhatTheCallerAskedFor) {
  const UniqueFd file = open_plain(4096);
  std::vector<std::byte> data(300);
  const auto queue = make_queue();
  RequestBatch batch(3);
  batch.set(0, IoKind::kWrite, file.get(), 0, std::span(data).subspan(0, 100));
  batch.set(1, IoKind::kWrite, file.get(), 100, std::span(data).subspan(100, 50));
  batch.set(2, IoKind::kRead, file.get(), 1000, std::span(data).subspan(200, 7));
  for (std::uint64_t round = 1; round <= 3; ++round) {
    batch.submit_and_wait(*queue);  // no wait_idle(), because counting precedes callbacks
    const IoCounters counters = queue->counters();
    EXPECT_EQ(counters.write_requests, 2 * round);
    EXPECT_EQ(counters.write_bytes, 150 * round);
    EXPECT_EQ(counters.read_requests, round);
    EXPECT_EQ(counters.read_bytes, 7 * round);
    EXPECT_EQ(counters.failed, 0u);
    EXPECT_EQ(counters.resumed, 0u);
    EXPECT_EQ(counters.retried, 0u);
  }
}

TEST_P(IoQueueContract, RejectsDepthsOutOfBounds) {
  for (const std::uint32_t depth : {0u, 4097u}) {
    const std::string message =
        expect_error(ErrorCode::kInvalidArgument, [&] { (void)make_queue(depth); });
    EXPECT_NE(message.find(std::to_string(depth)), std::string::npos) << message;
  }
}

}  // namespace sluice::test
