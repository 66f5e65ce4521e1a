// The scheduler by itself: what becomes of an exception, wherever on its thread it is thrown.
#include "engine/run/scheduler.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cfenv>
#include <chrono>
#include <functional>
#include <future>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "engine/run/wait_limit.h"
#include "engine/run/worker.h"
#include "tests/support/delays.h"
#include "tests/support/expect_error.h"

namespace sluice::test {
namespace {

Error broken() {
  return {ErrorCode::kIo, "the drive is gone"};
}

TEST(Scheduler, AnExceptionOfAPredicateIsTheFailure) {
  Scheduler scheduler;
  const std::string message =
      expect_error(ErrorCode::kIo, [&] { scheduler.await([]() -> bool { throw broken(); }); });
  EXPECT_EQ(message, "the drive is gone");
  EXPECT_TRUE(scheduler.failed());
  EXPECT_TRUE(scheduler.is_heard());
  int runs = 0;
  scheduler.run([&] { ++runs; });  // its thread goes on
  EXPECT_EQ(runs, 1);
}

TEST(Scheduler, WhatIsNoErrorBecomesAnInternalOne) {
  Scheduler scheduler;
  const std::string message = expect_error(ErrorCode::kInternal, [&] {
    scheduler.await([]() -> bool { throw std::runtime_error("out of cheese"); });
  });
  EXPECT_EQ(message, "out of cheese");
}

// A waiter that sits failures out is asked again.
TEST(Scheduler, AnExceptionOfAPredicateThatSitsFailuresOutDoesNotEndItsWait) {
  Scheduler scheduler;
  int asked = 0;
  scheduler.await_settled([&] {
    if (++asked == 1) throw broken();
    return true;
  });
  EXPECT_EQ(asked, 2);
  EXPECT_TRUE(scheduler.failed());
  EXPECT_FALSE(scheduler.is_heard());
  (void)expect_error(ErrorCode::kIo, [&] { scheduler.throw_if_failed(); });
  EXPECT_TRUE(scheduler.is_heard());
}

TEST(Scheduler, AnExceptionBehindTasksIsTheFailure) {
  Scheduler scheduler;
  scheduler.settle_with([]() -> bool { throw broken(); });
  (void)expect_error(ErrorCode::kIo, [&] { scheduler.await([] { return false; }); });
  scheduler.settle_with({});
}

TEST(TaskThread, AnExceptionOfItsHookIsReported) {
  std::atomic<int> reported = 0;
  {
    TaskThread thread("tested", {.after_tasks = [] { throw std::runtime_error("out of cheese"); },
                                 .on_exception = [&](std::exception_ptr) { ++reported; }});
    thread.post([] {});
    thread.post([] { throw std::runtime_error("again"); });
  }
  EXPECT_GE(reported, 2);
}

// The wait ends, nothing has failed, and nothing of it is left.
TEST(Scheduler, ALimitedWaitEnds) {
  Scheduler scheduler;
  std::atomic<int> asked = 0;
  std::atomic<bool> is_ready = false;
  const std::function<bool()> ready = [&] {
    ++asked;
    return is_ready.load();
  };
  const WaitLimit limit{std::chrono::milliseconds(30)};
  {
    const LimitedWait may_end;
    EXPECT_THROW(scheduler.await(ready), WaitEnded);
    EXPECT_FALSE(scheduler.failed());
    const int before = asked;
    scheduler.run([] {});
    EXPECT_EQ(asked, before) << "it is still waited for";
    is_ready = true;
    scheduler.await(ready);
    is_ready = false;
  }
  // All other waits last as long as they need.
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    is_ready = true;
    scheduler.post([] {});
  });
  scheduler.await(ready);
  later.join();
  const LimitedWait may_end;
  (void)expect_error(ErrorCode::kIo, [&] { scheduler.await([]() -> bool { throw broken(); }); });
}

// Its limit is over before the scheduler has seen it.
TEST(Scheduler, AWaitWithoutTimeIsAskedOnce) {
  Scheduler scheduler;
  std::promise<void> begun;
  std::promise<void> gate;
  scheduler.post([&] {
    begun.set_value();
    gate.get_future().wait();
  });
  begun.get_future().wait();
  std::thread opens([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    gate.set_value();
  });
  const WaitLimit limit{std::chrono::milliseconds(0)};
  {
    const LimitedWait may_end;
    int asked = 0;
    EXPECT_NO_THROW(scheduler.await([&] { return ++asked > 0; }));
    EXPECT_EQ(asked, 1);
  }
  opens.join();
}

TEST(TaskThread, ACallerRunsItsTaskWhereTheThreadHasNothingToDo) {
  int after = 0;
  TaskThread thread("tested", {.after_tasks = [&] { ++after; }, .on_exception = {}});
  std::thread::id ran_by;
  thread.post_here([&] { ran_by = std::this_thread::get_id(); });
  EXPECT_EQ(ran_by, std::this_thread::get_id());
  EXPECT_EQ(after, 1);
}

// The tasks that it posts are done, too; a task that posts itself forever is left to the thread.
TEST(TaskThread, ACallerRunsTheTasksOfItsTask) {
  std::atomic<bool> is_over = false;
  std::atomic<int> runs = 0;
  std::function<void()> again;  // before the thread, which may still copy it as it ends
  TaskThread thread("tested", {.after_tasks = {}, .on_exception = {}});
  std::vector<std::thread::id> ran_by;
  thread.post_here([&] {
    thread.post([&] {
      ran_by.push_back(std::this_thread::get_id());
      thread.post([&] { ran_by.push_back(std::this_thread::get_id()); });
    });
  });
  EXPECT_EQ(ran_by, std::vector(2, std::this_thread::get_id()));
  const Watchdog watchdog(std::chrono::seconds(60), "the caller does not come back");
  again = [&] {
    ++runs;
    if (!is_over) thread.post(again);
  };
  thread.post_here(again);
  while (runs < 100) std::this_thread::yield();
  is_over = true;
}

// Behind a task that waits, a short one is the thread's.
TEST(TaskThread, ACallerRunsNoTaskThatWaits) {
  std::promise<void> begun;
  std::promise<void> may_end;
  std::thread::id first, second;
  const std::thread::id caller = std::this_thread::get_id();
  {
    TaskThread thread("tested", {.after_tasks = {}, .on_exception = {}});
    thread.post_here_if_idle([&] { first = std::this_thread::get_id(); });
    EXPECT_EQ(first, caller);
    thread.post([&] {
      begun.set_value();
      may_end.get_future().wait();
      thread.post([] {});
      thread.post_here_if_idle([&] { second = std::this_thread::get_id(); });
    });
    begun.get_future().wait();
    thread.post_here_if_idle([&] { EXPECT_NE(std::this_thread::get_id(), caller); });
    may_end.set_value();
  }
  EXPECT_NE(second, caller);
  EXPECT_NE(second, std::thread::id());
}

TEST(TaskThread, ACallersTaskWaitsForTheTasksBeforeIt) {
  std::vector<int> order;
  std::thread::id ran_by;
  std::promise<void> begun;
  std::promise<void> may_end;
  {
    TaskThread thread("tested", {.after_tasks = {}, .on_exception = {}});
    thread.post([&] {
      begun.set_value();
      may_end.get_future().wait();
      order.push_back(1);
    });
    begun.get_future().wait();
    thread.post_here([&] {
      order.push_back(2);
      ran_by = std::this_thread::get_id();
    });
    EXPECT_TRUE(order.empty()) << "the caller does not wait";
    may_end.set_value();
  }
  EXPECT_EQ(order, (std::vector{1, 2}));
  EXPECT_NE(ran_by, std::this_thread::get_id());
}

// While a caller runs its task, the thread sleeps, and only the caller can wake it.
TEST(TaskThread, TasksThatComeWhileACallerRunsItsOwnAreNotForgotten) {
  std::promise<void> ran;
  std::promise<void> begun;
  std::atomic<bool> is_posted = false;
  const std::thread::id caller = std::this_thread::get_id();
  TaskThread thread("tested", {.after_tasks = {}, .on_exception = {}});
  const Watchdog watchdog(std::chrono::seconds(60), "a task has been forgotten");
  thread.post([&] { begun.set_value(); });
  begun.get_future().wait();
  while (!is_posted) {
    thread.post_here([&] {
      if (std::this_thread::get_id() != caller || is_posted.exchange(true)) return;
      thread.post([&] { ran.set_value(); });
    });
  }
  ran.get_future().wait();
}

// The caller may round, or flush denormal numbers, in a way of its own.
TEST(Worker, ShortWorkIsTheCallersInTheWorkersEnvironment) {
  ASSERT_EQ(std::fesetround(FE_UPWARD), 0);
  Scheduler scheduler;
  Worker worker(1, scheduler);
  std::thread::id ran_by;
  int rounding = -1;
  bool is_done = false;
  scheduler.run([&] {
    worker.post_here(
        [&] {
          ran_by = std::this_thread::get_id();
          rounding = std::fegetround();
        },
        [&] { is_done = true; });
  });
  const int after = std::fegetround();
  (void)std::fesetround(FE_TONEAREST);
  EXPECT_EQ(ran_by, std::this_thread::get_id());
  EXPECT_EQ(rounding, FE_TONEAREST);
  EXPECT_EQ(after, FE_UPWARD);
  EXPECT_TRUE(is_done) << "the task that follows from the caller's is the caller's, too";
}

TEST(Worker, AnExceptionOfShortWorkIsTheFailure) {
  Scheduler scheduler;
  Worker worker(1, scheduler);
  bool is_done = false;
  scheduler.run([&] { worker.post_here([] { throw broken(); }, [&] { is_done = true; }); });
  (void)expect_error(ErrorCode::kIo, [&] { scheduler.throw_if_failed(); });
  scheduler.await_settled([&] { return is_done; });
}

}  // namespace
}  // namespace sluice::test
