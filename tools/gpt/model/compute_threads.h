// The threads that compute the model. The threads form an arena with a fixed number of workers. The
// calling thread is one of the workers. The caller divides the work into numbered tasks. The
// division must depend only on sizes, and the tasks must write disjoint memory. Under these
// conditions, results do not depend on the worker that runs a task, or on the time at which the
// task runs.
// Thread rule: only one call may run at a time.
#pragma once

#include <cstdint>

#include <sluice/error.h>
#include "cpu_optim/worker_arena.h"

namespace sluice::gpt {

class ComputeThreads {
 public:
  // Fails with kConfig if `threads` is 0.
  explicit ComputeThreads(unsigned threads) : arena_(checked(threads)) {}

  unsigned threads() const { return arena_.threads(); }

  // Calls body(task, worker) for every task in [0, task_count), and returns when all tasks are
  // done. `worker` is a number below threads(). `body` can use this number to select scratch memory
  // (cpu_optim/worker_arena.h).
  // Requires: `body` does not throw and does not call for_each.
  template <class Body>
  void for_each(std::uint64_t task_count, const Body& body) {
    arena_.for_each(task_count, body);
  }

 private:
  static unsigned checked(unsigned threads) {
    if (threads == 0)
      throw Error(ErrorCode::kConfig, "the number of compute threads is 0; it must be at least 1");
    return threads;
  }

  WorkerArena arena_;
};

}  // namespace sluice::gpt
