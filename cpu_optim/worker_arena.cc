#include "cpu_optim/worker_arena.h"

#include <oneapi/tbb/blocked_range.h>
#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/info.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>

#include <optional>

namespace sluice {

struct WorkerArena::Tbb {
  explicit Tbb(unsigned threads) {
    // oneTBB starts no more workers than there are cores unless told; the caller's number counts.
    if (threads > static_cast<unsigned>(tbb::info::default_concurrency()))
      more_workers.emplace(tbb::global_control::max_allowed_parallelism, threads);
    arena.initialize(static_cast<int>(threads));
  }

  std::optional<tbb::global_control> more_workers;
  tbb::task_arena arena;
};

WorkerArena::WorkerArena(unsigned threads)
    : threads_(threads), tbb_(std::make_unique<Tbb>(threads)) {}

WorkerArena::~WorkerArena() = default;

void WorkerArena::run(std::uint64_t count, Call call, const void* body) {
  if (count == 0) return;
  using Range = tbb::blocked_range<std::uint64_t>;
  tbb_->arena.execute([&] {
    tbb::parallel_for(
        Range(0, count),
        [&](const Range& range) {
          const auto worker = static_cast<unsigned>(tbb::this_task_arena::current_thread_index());
          for (std::uint64_t i = range.begin(); i != range.end(); ++i) call(body, i, worker);
        },
        tbb::simple_partitioner());
  });
}

}  // namespace sluice
