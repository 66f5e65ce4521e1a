// The scheduler has one thread. This thread owns the state machines of the prefetcher, the gradient
// drain and the optimizer pass. Completions of transfers, copies and arithmetic are posted to this
// thread. The application's thread waits for the results in await(). If the application's thread
// posts a task while the scheduler's thread has nothing to do, the application's thread runs this
// task. So "the scheduler's thread" means the thread that is running the tasks. The scheduler keeps
// the first failure. After this failure, no new work is started, and the application's next call
// rethrows the failure.
//
// Thread rule: any thread may call post() and fail(). The application's thread calls post_here(),
// run(), await() and await_settled().
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

#include <sluice/error.h>
#include "engine/plan/pool_meter.h"
#include "engine/run/task_thread.h"
#include "engine/run/work_meter.h"

namespace sluice {

class Scheduler {
 public:
  Scheduler();

  // Runs `task` later on the scheduler's thread.
  void post(std::function<void()> task) { thread_.post(std::move(task)); }
  // Does the same as post(). If the scheduler's thread has nothing to do, the task has already run
  // when the call returns.
  void post_here(std::function<void()> task) { thread_.post_here(std::move(task)); }
  // Runs `task` on the scheduler's thread, and returns when the task has run. If the task throws an
  // exception, the call throws this exception.
  void run(const std::function<void()>& task);

  // The call blocks until `ready` returns true. The scheduler's thread evaluates `ready` after each
  // batch of tasks.
  // Fails with the first failure, as soon as there is one. An exception from `ready` counts as a
  // failure.
  void await(const std::function<bool()>& ready);
  // Does the same as await(), but ignores failures, so that the engine can shut down in order.
  void await_settled(const std::function<bool()>& ready);

  // After every batch of tasks, the thread runs `settle` before it checks the waiters. The thread
  // calls `settle` again and again until `settle` returns false. `settle` returns false if no state
  // machine has made progress. If `settle` is empty, the thread no longer calls a function after
  // its batches.
  void settle_with(std::function<bool()> settle);

  // Keeps `error` if it is the first failure, and wakes every waiter.
  void fail(const Error& error);
  // This overload does the same for any exception. An exception that is not an Error becomes an
  // Error with the code kInternal.
  void fail(std::exception_ptr thrown);
  bool failed() const { return has_failed_; }
  void throw_if_failed() const;
  // Whether throw_if_failed() or await() has already thrown the first failure.
  bool is_heard() const { return is_heard_; }

  // The work that the state machines have under way. Only the scheduler's thread may use this
  // object.
  WorkMeter& work() { return work_; }
  // Returns the meter of the buffers that are in use by the state machines. Only the scheduler's
  // thread may use this object.
  PoolMeter& pools() { return pools_; }

 private:
  // An application thread that is waiting. The object lies on the stack of this thread.
  struct Waiter {
    const std::function<bool()>& ready;
    bool heeds_failure;
    bool done = false;
  };

  void wait_for(Waiter& waiter);
  void after_tasks();
  bool settle();
  void wake_waiters();
  bool may_go_on(const Waiter& waiter);

  // Scheduler thread only.
  std::vector<Waiter*> waiters_;
  std::function<bool()> settle_;
  WorkMeter work_;
  PoolMeter pools_;

  // Guarded by mutex_.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::exception_ptr failure_;

  std::atomic<bool> has_failed_ = false;  // set after failure_
  mutable std::atomic<bool> is_heard_ = false;

  TaskThread thread_;  // last: its tasks use everything above
};

}  // namespace sluice
