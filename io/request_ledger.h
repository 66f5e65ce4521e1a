// The totals of a queue's requests: how many are open, for wait_idle(), and the results of those
// that ended, for counters(). Every queue keeps one.
//
// Thread rule: any thread.
// Invariant: a request is opened once, ends once, and is closed once, after its callback has
// returned; wait_idle() depends on no request opened after its call, so that other threads'
// submissions cannot starve it.
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
  // Opens `request_count` requests and returns the ticket of the first; the others follow it.
  std::uint64_t open(std::uint64_t request_count);

  // Counts one attempt at `request`. Comes before on_complete, so that a thread woken by
  // on_complete finds the request counted.
  void count(const IoRequest& request, TransferStep step);

  // The request with `ticket` has ended and its callback has returned.
  void close(std::uint64_t ticket);

  // See IoQueue.
  void wait_idle();
  IoCounters counters() const;

 private:
  // One thread in wait_idle(), on its stack.
  struct Waiter {
    std::uint64_t tickets_end;  // it waits for the lower tickets
    std::uint64_t open;         // how many of them are open
  };

  // Guarded by mutex_.
  mutable std::mutex mutex_;
  std::condition_variable waiter_done_;
  std::uint64_t opened_ = 0;
  std::uint64_t closed_ = 0;
  std::vector<Waiter*> waiters_;
  IoCounters counters_;
};

// Fails with: kInvalidArgument when the depth is not 1 to 4096.
void check_options(const IoQueueOptions& options);

}  // namespace sluice
