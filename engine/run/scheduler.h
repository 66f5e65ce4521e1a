// The one thread that owns the state machines of prefetch, drain and pass. Completions of
// transfers, copies and arithmetic are posted to this thread, and the application's thread waits
// here for the results. While this thread has nothing to do, the application's thread runs its own
// tasks in its place: "the scheduler's thread" is the one that runs them. Keeps the first failure,
// which stops admission of new work and is rethrown at the next call from the application.
//
// Thread rule: post() and fail() from any thread; post_here(), run(), await() and await_settled()
// from the application's thread.
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
  // The same, but where that thread has nothing to do, the task has run on return.
  void post_here(std::function<void()> task) { thread_.post_here(std::move(task)); }
  // Runs `task` on the scheduler's thread, and returns when the task has run. An exception from the
  // task is thrown to the caller.
  void run(const std::function<void()>& task);

  // Blocks until `ready` returns true. The scheduler's thread evaluates `ready` whenever something
  // has happened on this thread.
  // Fails with: the first failure, as soon as there is one; an exception from `ready` counts as a
  // failure.
  void await(const std::function<bool()>& ready);
  // The same, but ignores failures, so that the engine can shut down in order.
  void await_settled(const std::function<bool()>& ready);

  // Lets `settle` run after every batch of tasks, before waiters are checked. Then `settle` runs
  // again until it returns false because nothing has moved. An empty function ends these calls.
  void settle_with(std::function<bool()> settle);

  // Keeps `error` if it is the first failure, and wakes every waiter.
  void fail(const Error& error);
  // The same for any exception. An exception that is no Error becomes kInternal.
  void fail(std::exception_ptr thrown);
  bool failed() const { return has_failed_; }
  void throw_if_failed() const;
  // Whether there is a failure that throw_if_failed() or await() has thrown.
  bool is_heard() const { return is_heard_; }

  // The work that this thread's state machines have under way. Scheduler's thread only.
  WorkMeter& work() { return work_; }
  // The buffers that the state machines have lent. Scheduler's thread only.
  PoolMeter& pools() { return pools_; }

 private:
  // An application thread in await(); lives on its stack.
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
