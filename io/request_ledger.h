// The totals of a queue's requests. For wait_idle(), the ledger counts open requests. For
// counters(), the ledger counts the results of ended requests. Every queue has a ledger.
//
// Thread rule: any thread.
// Invariant: a request is opened once and ends once. A request is closed once, after its callback
// has returned. A call of wait_idle() ignores requests that are opened later, so that submissions
// of other threads cannot delay its return forever.
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
  // Opens `request_count` requests and returns the ticket of the first request. The other requests
  // have the next tickets.
  std::uint64_t open(std::uint64_t request_count);

  // The call counts one attempt at `request`. The call comes before on_complete. If on_complete
  // wakes a thread, that thread then finds the request already counted.
  void count(const IoRequest& request, TransferStep step);

  // Called when the request with `ticket` has ended and its callback has returned.
  void close(std::uint64_t ticket);

  // See IoQueue.
  void wait_idle();
  IoCounters counters() const;

 private:
  // One thread in wait_idle(). The object lies on that thread's stack.
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
