// Counts the requests of a queue. wait_idle() needs the number of open requests. counters() needs
// the results of the requests that have ended. Every queue has its own ledger.
//
// Thread rule: any thread.
// Invariant: each request is opened once, ends once, and is then closed once. A request is closed
// after its callback has returned. wait_idle() ignores requests that are opened after the call, so
// that submissions by other threads cannot delay the call forever.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "io/io_queue.h"
#include "io/transfer_progress.h"

namespace sluice {

class RequestLedger {
 public:
  // Opens `request_count` requests and returns the ticket of the first one. The tickets of the
  // other requests follow in order.
  std::uint64_t open(std::uint64_t request_count);

  // Counts one attempt at `request`. Must be called before on_complete, because on_complete may
  // wake a thread that reads the counts.
  void count(const IoRequest& request, TransferStep step);

  // Called when the request with `ticket` has ended and its callback has returned.
  void close(std::uint64_t ticket);

  // Does what IoQueue::wait_idle() describes.
  void wait_idle();
  IoCounters counters() const;

 private:
  // A thread that is inside wait_idle(). The object lies on that thread's stack.
  struct Waiter {
    std::uint64_t tickets_end;  // the thread waits for lower tickets
    std::uint64_t open;         // the number of open requests with lower tickets
  };

  // Guarded by mutex_.
  mutable std::mutex mutex_;
  std::condition_variable waiter_done_;
  std::uint64_t opened_ = 0;
  std::uint64_t closed_ = 0;
  std::vector<Waiter*> waiters_;
  IoCounters counters_;
};

// Fails with kInvalidArgument if the depth is not between 1 and 4096.
void check_options(const IoQueueOptions& options);

}  // namespace sluice
