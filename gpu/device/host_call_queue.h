// A queue of the host functions of one CUDA stream. The queue has the functions that have not run
// yet, in the order of the add() calls. The runtime calls back once for each function. After a
// failure, the runtime may call back late, in another order, or never. The functions still run in
// the order of the queue. So when a function runs, all earlier functions have run.
//
// Thread rule: any thread may call every function.
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
  // `failure` must live until every function has run. The queue may live longer than `failure`.
  explicit HostCallQueue(FailureLatch& failure) : failure_(failure) {}

  // Returns the number of the function. The first number is 1.
  std::uint64_t add(std::function<void()> function);
  // The runtime calls this function when the work before function `number` has ended. The call runs
  // the functions that have not run yet, up to function `number`. The call returns when all these
  // functions have run. If `failure` is given and some of these functions have not run yet, the
  // call first latches `failure`.
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
