#include "cpu_optim/worker_arena.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace sluice {
namespace {

bool blocks(int number) {
  sigset_t blocked;
  (void)::pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
  return ::sigismember(&blocked, number) == 1;
}

// oneTBB starts them from the calling thread, whose signals they would have.
TEST(WorkerArena, ItsThreadsLeaveTheSignalsOfTheProcessToOthers) {
  WorkerArena arena(4);
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<int> others = 0, takers = 0;
  for (int loops = 0; loops < 1000 && others == 0; ++loops) {
    arena.for_each(64, [&](std::uint64_t) {
      if (std::this_thread::get_id() != caller) {
        ++others;
        takers += blocks(SIGTERM) ? 0 : 1;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    });
  }
  EXPECT_GT(others, 0);
  EXPECT_EQ(takers, 0);
  EXPECT_FALSE(blocks(SIGTERM)) << "the caller's are as before";
}

}  // namespace
}  // namespace sluice
