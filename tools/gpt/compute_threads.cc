#include "tools/gpt/compute_threads.h"

#include <tbb/global_control.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <atomic>
#include <optional>

#include "base/error.h"

namespace sluice::gpt {

struct ComputeThreads::Arena {
  explicit Arena(unsigned threads) {
    // oneTBB starts no more workers than there are cores unless told; the user's number counts.
    if (threads > static_cast<unsigned>(tbb::info::default_concurrency()))
      more_workers.emplace(tbb::global_control::max_allowed_parallelism, threads);
    arena.initialize(static_cast<int>(threads));
  }
  std::optional<tbb::global_control> more_workers;
  tbb::task_arena arena;
};

ComputeThreads::ComputeThreads(unsigned threads) : threads_(threads) {
  if (threads == 0)
    throw Error(ErrorCode::kConfig, "the number of compute threads is 0; it must be at least 1");
  arena_ = std::make_unique<Arena>(threads);
}

ComputeThreads::~ComputeThreads() = default;

void ComputeThreads::run(std::uint64_t task_count, Call call, const void* context) {
  if (threads_ == 1 || task_count <= 1) {
    for (std::uint64_t task = 0; task < task_count; ++task) call(context, task, 0);
    return;
  }
  // oneTBB orders the caller's memory before every task and every task before its return, but
  // inside a library that ThreadSanitizer cannot see into; this counter says the same in the open.
  std::atomic<std::uint64_t> finished;
  finished.store(0, std::memory_order_release);  // publishes what the caller wrote
  arena_->arena.execute([&] {
    tbb::parallel_for(
        tbb::blocked_range<std::uint64_t>(0, task_count, 1),
        [&](const tbb::blocked_range<std::uint64_t>& range) {
          finished.fetch_add(0, std::memory_order_acq_rel);  // after the caller's writes
          const auto worker = static_cast<unsigned>(tbb::this_task_arena::current_thread_index());
          for (std::uint64_t task = range.begin(); task != range.end(); ++task)
            call(context, task, worker);
          finished.fetch_add(1, std::memory_order_acq_rel);  // before the load below
        },
        tbb::simple_partitioner());
  });
  const std::uint64_t seen = finished.load(std::memory_order_acquire);  // all tasks' writes
  SLUICE_CHECK(seen == task_count, "every task ran once");
}

}  // namespace sluice::gpt
