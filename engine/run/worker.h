// The thread on which the engine's arithmetic runs: Adam, gradient accumulation and norms. Tasks
// run in the order posted, and CpuOptimizer spreads each of them over the cores. A thread of its
// own keeps the scheduler free for completions.
// Thread rule: post() from the scheduler's thread.
#pragma once

#include <functional>

#include "cpu_optim/cpu_optimizer.h"
#include "engine/run/scheduler.h"
#include "engine/run/task_thread.h"

namespace sluice {

class Worker {
 public:
  // `scheduler` must outlive the worker.
  Worker(unsigned threads, Scheduler& scheduler);

  // The worker's thread runs `work`, and then the scheduler's thread runs `done`, even if `work`
  // has thrown. The exception becomes the scheduler's failure, and code that waits for `done`
  // continues.
  void post(std::function<void()> work, std::function<void()> done);
  // The same, but if the worker has nothing to do, `work` has run on return, on the calling thread.
  // For work that is shorter than the wake-up of the worker.
  void post_here(std::function<void()> work, std::function<void()> done);

  CpuOptimizer& optimizer() { return optimizer_; }

 private:
  std::function<void()> task(std::function<void()> work, std::function<void()> done);

  Scheduler& scheduler_;
  CpuOptimizer optimizer_;
  TaskThread thread_;
};

}  // namespace sluice
