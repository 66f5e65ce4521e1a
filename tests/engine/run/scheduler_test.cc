// The scheduler by itself: what becomes of an exception, wherever on its thread it is thrown.
#include "engine/run/scheduler.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <string>

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

}  // namespace
}  // namespace sluice::test
