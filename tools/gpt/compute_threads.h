// The threads that compute the model: an oneTBB arena of a fixed number of workers, the caller
// included. Work is cut by the caller into numbered tasks that depend on sizes only; which worker
// takes a task, and when, changes no result as long as tasks write disjoint memory.
// Thread rule: one call at a time.
#pragma once

#include <cstdint>
#include <memory>

namespace sluice::gpt {

class ComputeThreads {
 public:
  // Fails with: kConfig when `threads` is 0.
  explicit ComputeThreads(unsigned threads);
  ~ComputeThreads();

  unsigned threads() const { return threads_; }

  // Calls body(task, worker) for every task in [0, task_count) and returns when all are done. No
  // two calls at the same time have the same `worker`, which is below threads(): it names scratch
  // memory.
  // Requires: `body` does not throw and does not call for_each.
  template <class Body>
  void for_each(std::uint64_t task_count, const Body& body) {
    run(
        task_count,
        [](const void* context, std::uint64_t task, unsigned worker) {
          (*static_cast<const Body*>(context))(task, worker);
        },
        &body);
  }

 private:
  using Call = void (*)(const void* context, std::uint64_t task, unsigned worker);
  void run(std::uint64_t task_count, Call call, const void* context);

  struct Arena;
  unsigned threads_;
  std::unique_ptr<Arena> arena_;
};

}  // namespace sluice::gpt
