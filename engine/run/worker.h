// The thread on which the engine's arithmetic runs: Adam, gradient accumulation and norms, in the
// order posted, each spread over the cores by CpuOptimizer. Keeps the scheduler free for
// completions.
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

  // Runs `work` on the worker's thread, then `done` on the scheduler's, even if `work` has thrown.
  // The exception becomes the scheduler's failure; code waiting for `done` is not left hanging.
  void post(std::function<void()> work, std::function<void()> done);

  CpuOptimizer& optimizer() { return optimizer_; }

 private:
  Scheduler& scheduler_;
  CpuOptimizer optimizer_;
  TaskThread thread_;
};

}  // namespace sluice
