#include "tools/gpt/model/compute_threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include <sluice/error.h>

namespace sluice::gpt {
namespace {

TEST(ComputeThreads, RunsEveryTaskOnce) {
  for (const unsigned count : {1u, 2u, 3u}) {
    ComputeThreads threads(count);
    for (const std::uint64_t task_count : {0u, 1u, 2u, 1000u}) {
      std::vector<std::atomic<int>> runs(task_count);
      threads.for_each(task_count, [&](std::uint64_t task, unsigned) { ++runs[task]; });
      for (const std::atomic<int>& run : runs) EXPECT_EQ(run, 1);
    }
  }
}

// Tasks sleep, so that they overlap even where several threads share one core.
TEST(ComputeThreads, NoTwoTasksShareAWorkerAtOneTime) {
  for (const unsigned count : {2u, 3u}) {
    ComputeThreads threads(count);
    std::vector<std::atomic<bool>> busy(count);
    std::atomic<int> collisions = 0;
    std::atomic<int> out_of_range = 0;
    threads.for_each(60, [&](std::uint64_t, unsigned worker) {
      if (worker >= count) {
        ++out_of_range;
        return;
      }
      if (busy[worker].exchange(true)) ++collisions;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      busy[worker] = false;
    });
    EXPECT_EQ(collisions, 0);
    EXPECT_EQ(out_of_range, 0);
  }
}

TEST(ComputeThreads, NeedsAThread) {
  EXPECT_THROW(ComputeThreads(0), Error);
}

}  // namespace
}  // namespace sluice::gpt
