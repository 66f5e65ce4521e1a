// The host functions of one CUDA stream that have not run yet, in the order in which they were
// enqueued. The runtime calls back for each. After a failure it may refuse to, or call back late or
// in another order; the functions still run in this order, so a reader of one knows that the
// earlier ones have run.
//
// Thread rule: every function from any thread.
// Invariant: functions run one at a time.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>

#include "gpu/device/host_stream.h"

namespace sluice {

class HostCallQueue {
 public:
  // `failure` must live until every function has run; the queue may live longer.
  explicit HostCallQueue(FailureLatch& failure) : failure_(failure) {}

  // Returns the function's number: 1, 2, ...
  std::uint64_t add(std::function<void()> function);
  // Called at the end of the work before function `number`. Runs that function, and those before it
  // that have not run; returns when all of them have. `failure`, if any, is latched first, unless
  // all of them have run already.
  void run_up_to(std::uint64_t number, const std::exception_ptr& failure = nullptr);
  void run_all();

 private:
  FailureLatch& failure_;

  std::mutex mutex_;
  std::condition_variable has_run_;
  // Guarded by mutex_.
  std::deque<std::function<void()>> waiting_;
  std::uint64_t added_count_ = 0;
  std::uint64_t run_count_ = 0;
  bool is_running_ = false;  // a thread runs the next function
};

}  // namespace sluice
