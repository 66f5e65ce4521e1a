#include "cpu_optim/worker_arena.h"

#include <oneapi/tbb/blocked_range.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>

namespace sluice {

struct WorkerArena::Tbb {
  explicit Tbb(unsigned threads) : arena(static_cast<int>(threads)) {}

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
          for (std::uint64_t i = range.begin(); i != range.end(); ++i) call(body, i);
        },
        tbb::simple_partitioner());
  });
}

}  // namespace sluice
