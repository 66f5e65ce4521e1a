// The worker has a thread that runs the engine's arithmetic. The arithmetic consists of Adam,
// gradient accumulation and norms. Tasks run in the order in which they were posted, and
// CpuOptimizer spreads each task over the cores. Because the arithmetic has its own thread, the
// scheduler's thread has time to handle completions.
// Thread rule: the scheduler's thread calls post() and post_here().
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

  // The worker's thread runs `work`. Then the scheduler's thread runs `done`, even if `work` has
  // thrown an exception. In this case, the exception becomes the scheduler's failure. So code that
  // waits for `done` always continues.
  void post(std::function<void()> work, std::function<void()> done);
  // Does the same as post(). If the worker has nothing to do, the calling thread runs `work` before
  // the call returns. The function is meant for work that takes less time than waking the worker.
  void post_here(std::function<void()> work, std::function<void()> done);

  CpuOptimizer& optimizer() { return optimizer_; }

 private:
  std::function<void()> task(std::function<void()> work, std::function<void()> done);

  Scheduler& scheduler_;
  CpuOptimizer optimizer_;
  TaskThread thread_;
};

}  // namespace sluice
