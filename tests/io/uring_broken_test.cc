// A ring that the kernel refuses to work in the middle of a run: errors, no abort and no hang. And
// one whose kernel is only busy.
#include <dlfcn.h>
#include <liburing.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>
#include <vector>

#include "io/io_queue.h"
#include "tests/support/refused_syscall.h"
#include "tests/support/request_batch.h"
#include "tests/support/uring_pipe.h"

namespace {

// An error that the next calls return, and how many do.
struct Busy {
  std::atomic<int> error = 0;
  std::atomic<int> count = 0;
  bool is_next() { return count > 0 && count-- > 0; }
};
Busy submission;
Busy look;

}  // namespace

// Stand before the library's functions.
extern "C" int io_uring_submit_and_wait(io_uring* ring, unsigned count) {
  using Function = int(io_uring*, unsigned);
  static auto* const next =
      reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, "io_uring_submit_and_wait"));
  return submission.is_next() ? -submission.error : next(ring, count);
}
extern "C" int io_uring_get_events(io_uring* ring) {
  using Function = int(io_uring*);
  static auto* const next = reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, "io_uring_get_events"));
  return look.is_next() ? -look.error : next(ring);
}

namespace sluice::test {
namespace {

// From inside a callback, which runs on the thread that owns the ring, the kernel is made to refuse
// that thread's calls of io_uring_enter: all of them, or those that wait for a completion.
class UringQueueBroken : public UringPipe {
 protected:
  struct Breaking {
    RefusedSyscall refused;
    std::atomic<int> outcome = -1;  // 0: no filters here
  };
  // Returns false where filters are not allowed.
  bool break_ring(const RefusedSyscall& refused) {
    breaking_.refused = refused;
    breaking_.outcome = -1;
    request_ = {};
    request_.context = &breaking_;
    request_.on_complete = [](IoRequest& done) {
      auto* const to_break = static_cast<Breaking*>(done.context);
      to_break->outcome = refuse_for_this_thread(to_break->refused) ? 1 : 0;
      to_break->outcome.notify_one();
    };
    IoRequest* const pointer = &request_;
    queue_->submit({&pointer, 1});
    breaking_.outcome.wait(-1);
    return breaking_.outcome == 1;
  }

  Breaking breaking_;
  IoRequest request_;
};

TEST_F(UringQueueBroken, EndsWhatTheKernelHasNotTakenAndWaitsForTheRest) {
  for (const int error : {ENOMEM, EIO}) {
    queue_ = make_uring_queue({.depth = 2});
    std::vector<std::byte> data(4096);
    RequestBatch taken(1);
    taken.set(0, IoKind::kRead, source_.get(), 0, data);
    queue_->submit(taken.pointers());
    if (!break_ring({.number = SYS_io_uring_enter, .error = error, .argument = 2, .bits = 1}))
      GTEST_SKIP() << "seccomp filters are not allowed here";
    std::vector<std::byte> other(4096);
    for (int time = 0; time < 3; ++time) {
      RequestBatch refused(5);
      for (std::size_t i = 0; i < refused.size(); ++i)
        refused.set(i, IoKind::kRead, source_.get(), 0, other);
      refused.submit_and_wait(*queue_);
      for (std::size_t i = 0; i < refused.size(); ++i) EXPECT_EQ(refused[i].error, error);
    }
    EXPECT_EQ(taken.completion_count(), 0u);
    const std::vector<std::byte> written(4096, std::byte{9});
    ASSERT_EQ(::write(target_.get(), written.data(), written.size()), 4096);
    taken.wait();
    EXPECT_EQ(taken[0].error, 0);
    EXPECT_EQ(data[4095], std::byte{9});
    queue_->wait_idle();
  }
}

// A look that a signal interrupts is no refusal to look.
TEST_F(UringQueueBroken, LooksAgainBehindASignal) {
  std::vector<std::byte> data(4096);
  RequestBatch taken(1);
  taken.set(0, IoKind::kRead, source_.get(), 0, data);
  queue_->submit(taken.pointers());
  look.error = EINTR;
  look.count = 600;  // more than refusals that end everything
  if (!break_ring({.number = SYS_io_uring_enter, .error = EIO, .argument = 2, .bits = 1}))
    GTEST_SKIP() << "seccomp filters are not allowed here";
  RequestBatch refused(1);
  refused.set(0, IoKind::kRead, source_.get(), 0, data);
  refused.submit_and_wait(*queue_);
  for (int i = 0; i < 5000 && look.count > 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(taken.completion_count(), 0u);
  const std::vector<std::byte> written(4096, std::byte{9});
  ASSERT_EQ(::write(target_.get(), written.data(), written.size()), 4096);
  taken.wait();
  EXPECT_EQ(taken[0].error, 0);
  queue_->wait_idle();
}

// Not even asking is allowed: the end comes all the same.
TEST_F(UringQueueBroken, EndsEverythingWhenTheKernelSaysNothingMore) {
  std::vector<std::byte> data(4096);
  RequestBatch taken(1);
  taken.set(0, IoKind::kRead, source_.get(), 0, data);
  queue_->submit(taken.pointers());
  if (!break_ring({.number = SYS_io_uring_enter, .error = EIO}))
    GTEST_SKIP() << "seccomp filters are not allowed here";
  taken.wait();
  EXPECT_EQ(taken[0].error, EIO);
  RequestBatch refused(1);
  refused.set(0, IoKind::kRead, source_.get(), 0, data);
  refused.submit_and_wait(*queue_);
  EXPECT_EQ(refused[0].error, EIO);
  queue_.reset();
}

// A kernel that is short of memory, or a signal: the next call takes the requests.
TEST_F(UringQueueBroken, GoesOnBehindABusyKernel) {
  for (const int error : {EAGAIN, EBUSY, EINTR}) {
    std::vector<std::byte> data(20);
    RequestBatch batch(data.size());
    for (std::size_t i = 0; i < data.size(); ++i)
      batch.set(i, IoKind::kRead, source_.get(), 0, std::span(data).subspan(i, 1));
    ASSERT_EQ(::write(target_.get(), data.data(), data.size()), 20);
    submission.error = error;
    submission.count = 5;
    batch.submit_and_wait(*queue_);
    EXPECT_EQ(submission.count, 0);
    for (std::size_t i = 0; i < data.size(); ++i) EXPECT_EQ(batch[i].error, 0);
  }
}

}  // namespace
}  // namespace sluice::test
