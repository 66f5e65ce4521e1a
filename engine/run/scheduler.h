// The one thread that owns the state machines of prefetch, drain and pass. Completions of
// transfers, copies and arithmetic are posted to it; the application thread waits here for what
// they bring about. Keeps the first failure: it stops admission of new work and is rethrown at the
// next call from the application.
//
// Thread rule: post() and fail() from any thread; run(), await() and await_settled() from the
// application's thread.
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

  // Runs `task` on the scheduler's thread, some time later.
  void post(std::function<void()> task) { thread_.post(std::move(task)); }
  // Runs `task` there and returns when it has run; what it throws comes back to the caller.
  void run(const std::function<void()>& task);

  // Blocks until `ready`, evaluated on the scheduler's thread whenever something has happened
  // there, returns true.
  // Fails with: the first failure, as soon as there is one; what `ready` throws becomes one.
  void await(const std::function<bool()>& ready);
  // The same, but sits failures out: for shutting down in order.
  void await_settled(const std::function<bool()>& ready);

  // Has `settle` run whenever tasks have run, before waiters are asked, and again until it returns
  // false: nothing has moved since. An empty one ends that.
  void settle_with(std::function<bool()> settle);

  // Latches `error` if it is the first, and wakes every waiter.
  void fail(const Error& error);
  // The same for whatever was thrown; what is no Error becomes kInternal.
  void fail(std::exception_ptr thrown);
  bool failed() const { return has_failed_; }
  void throw_if_failed() const;
  // There is a failure, and throw_if_failed() or await() has thrown it.
  bool is_heard() const { return is_heard_; }

  // What those on this thread have given others to do. Scheduler's thread only.
  WorkMeter& work() { return work_; }
  // What they have lent. Likewise.
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

  TaskThread thread_;  // last: its tasks use all of the above
};

}  // namespace sluice
