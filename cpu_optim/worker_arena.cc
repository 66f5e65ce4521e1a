#include "cpu_optim/worker_arena.h"

#include <oneapi/tbb/blocked_range.h>
#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/info.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>
#include <oneapi/tbb/task_scheduler_observer.h>

#include <cerrno>
#include <optional>
#include <stdexcept>
#include <string_view>

#include <fmt/format.h>

#include "base/float_environment.h"
#include "base/named_thread.h"
#include "base/numa.h"

namespace sluice {
namespace {

// Spreads an arena's own threads over the NUMA nodes while they work for it. Calling threads stay
// where they are.
class NodeBinder : public tbb::task_scheduler_observer {
 public:
  NodeBinder(tbb::task_arena& arena, unsigned threads)
      : tbb::task_scheduler_observer(arena), threads_(threads) {
    if (nodes_.count() > 1 || NumaNodes::binds_new_threads()) observe(true);
  }
  ~NodeBinder() override { observe(false); }

  void on_scheduler_entry(bool is_worker) override {
    if (!is_worker) return;
    const auto worker = static_cast<unsigned>(tbb::this_task_arena::current_thread_index());
    nodes_.bind_this_thread(nodes_.node_of(worker, threads_));
  }
  void on_scheduler_exit(bool is_worker) override {
    if (is_worker) nodes_.unbind_this_thread();
  }

 private:
  const NumaNodes& nodes_ = NumaNodes::of_machine();
  unsigned threads_;
};

}  // namespace

struct WorkerArena::Tbb {
  explicit Tbb(unsigned threads) {
    // oneTBB starts no more workers than there are cores unless told; the caller's number counts.
    if (threads > static_cast<unsigned>(tbb::info::default_concurrency()))
      more_workers.emplace(tbb::global_control::max_allowed_parallelism, threads);
    arena.initialize(static_cast<int>(threads));
    binder.emplace(arena, threads);
  }

  std::optional<tbb::global_control> more_workers;
  tbb::task_arena arena;
  std::optional<NodeBinder> binder;
};

WorkerArena::WorkerArena(unsigned threads)
    : threads_(threads), tbb_(std::make_unique<Tbb>(threads)) {}

WorkerArena::~WorkerArena() = default;

void WorkerArena::run(std::uint64_t count, Call call, const void* body) {
  if (count == 0) return;
  using Range = tbb::blocked_range<std::uint64_t>;
  const auto loop = [&] {
    tbb::parallel_for(
        Range(0, count),
        [&](const Range& range) {
          const FloatEnvironment environment;  // oneTBB has started its threads
          const auto worker = static_cast<unsigned>(tbb::this_task_arena::current_thread_index());
          for (std::uint64_t i = range.begin(); i != range.end(); ++i) call(body, i, worker);
        },
        tbb::simple_partitioner());
  };
  try {
    // oneTBB starts its threads where they have work: for one iteration, the calling thread is
    // enough.
    std::optional<SignalsBlocked> signals;
    if (count > 1) signals.emplace();
    tbb_->arena.execute(loop);
  } catch (const std::runtime_error& error) {
    // oneTBB starts its threads when they have work, and has no type for this error.
    if (!std::string_view(error.what()).starts_with("pthread_create")) throw;
    throw thread_refused(fmt::format("one of {} threads for updates", threads_), EAGAIN);
  }
}

}  // namespace sluice
