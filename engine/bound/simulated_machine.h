// The machine on which the bound's simulation runs. The machine has resources, and computes from
// rates how long a job takes. The machine keeps a calendar of the ends of jobs, and an account of
// time and bytes. Each resource serves one job at a time and never interrupts a job. The waiting
// job with the lowest rank is served first. The order of jobs depends only on the ranks of the
// jobs. So equal times always give equal schedules.
//
// The bandwidth of host memory is no line of jobs: many jobs draw on it at once. The machine only
// counts the bytes. A step takes at least as long as host memory takes for them (step_cost.h).
//
// Times are whole numbers of ticks, so that sums of times have no rounding errors. A tick is a
// nanosecond. A tick is longer than a nanosecond only if the steps take years.
//
// Thread rule: one thread, because one simulation owns the object.
// Invariant: all jobs that end at one instant have ended before any resource starts its next job.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "engine/bound/ranked_queue.h"
#include "engine/bound/simulated_state.h"
#include "engine/bound/step_cost.h"
#include "io/write_cache_model.h"

namespace sluice {

// The kinds of jobs. Each comment says what has happened when the job ends. Each comment also names
// the subject of the job, for example a block.
enum class SimulatedTask : std::uint8_t {
  kFetch,       // a block's parameters are in its slot
  kCopyUp,      // a block of a fetch has been copied to the device
  kCompute,     // a use is computed
  kDrain,       // a use's gradient has left the device
  kAccumulate,  // a use's gradient is added to the earlier ones
  kNorm,        // the norm of a use's gradient is known
  kLoad,        // one part of a block's state is in the lane
  kAdam,        // a block is updated
  kDeviceAdam,  // a block whose state is at home on the device is updated
  kStreamUp,    // a block that the device will update is on the device
  kStreamAdam,  // the device has updated this block
  kStreamDown,  // this block is back in host memory
  kPublish,     // a block's new parameters are on the device
  kWriteBack,   // one part of a block is at home
  kSpillCopy,   // a block of a gradient that waits on storage has left the device
  kSpillSum,    // the sum so far is in host memory
  kSpillAdd,    // the gradient is added to the sum, and to the norm
  kSpillStore,  // a block of the gradient is at its waiting place
  kSaveCopy,    // a block to be committed has left the device
  kSave,        // a block that is at home in memory is on storage
  kFlush,       // earlier writes of a commit are durable
};

struct SimulatedJob {
  SimulatedTask task{};
  std::uint64_t subject = 0;
  std::uint64_t rank = 0;  // unique among the jobs that wait for one resource
};

// Returns the rank of a job. Jobs are ordered by urgency. Jobs of the same urgency are ordered by
// `place`.
constexpr std::uint64_t ranked(std::uint64_t urgency, std::uint64_t place) {
  return urgency << 56 | place;
}

class SimulatedMachine {
 public:
  // `on_end` is called when a job ends. If a job takes no time, the call that starts the job also
  // calls `on_end`. The rates of `shape` must outlive the machine. The length of a tick is chosen
  // so that `steps` steps do not run out of ticks.
  SimulatedMachine(const StepShape& shape, std::uint64_t steps,
                   std::function<void(const SimulatedJob&)> on_end);

  void read(const SimulatedJob& job, std::uint64_t size_bytes);
  void write(const SimulatedJob& job, std::uint64_t size_bytes);
  // Occupies the drive in the same way as a write. A flush takes `duration_s` plus the time for
  // emptying the write cache.
  void flush(const SimulatedJob& job, double duration_s);
  void copy_up(const SimulatedJob& job, std::uint64_t size_bytes);
  void copy_down(const SimulatedJob& job, std::uint64_t size_bytes);
  void compute(const SimulatedJob& job, double duration_s);
  void norm(const SimulatedJob& job, std::uint64_t element_count);
  void adam(const SimulatedJob& job, std::uint64_t element_count);
  void device_adam(const SimulatedJob& job, std::uint64_t element_count);

  // Returns whether the CPU is idle and no job waits for the CPU.
  bool cpu_is_free() const;

  // Lets every idle resource start a job, and advances to the next instant at which jobs end.
  // Requires: a job is under way.
  void advance();

  // Adds all running and all waiting jobs to `state`. Requires: there is no write cache.
  void add_to(SimulatedState& state) const;
  // Returns the simulation's time and bytes since the start. The member step_s of the result is the
  // present time.
  StepCost account() const;

 private:
  enum class CacheUse : std::uint8_t { kNone, kWrite, kFlush };
  struct Timed {
    SimulatedJob job;
    std::int64_t duration_ticks = 0;  // without the write cache's part
    std::int64_t latency_ticks = 0;   // from the end of service to the end of the job
    CacheUse cache = CacheUse::kNone;
    std::uint64_t cached_bytes = 0;
  };
  struct Line {
    RankedQueue<Timed> waiting;
    bool is_busy = false;
    bool ends_job = false;        // true if the job ends when the line is free
    std::int64_t free_ticks = 0;  // of a busy line
    std::uint64_t number = 0;     // orders jobs that end at one instant
    SimulatedJob job;
    std::int64_t busy_ticks = 0;
    std::int64_t idle_since_ticks = 0;
  };
  // An entry says when a job ends. The time includes the job's latency.
  struct Entry {
    std::int64_t time_ticks = 0;
    std::uint64_t number = 0;
    SimulatedJob job;
    bool operator>(const Entry& other) const {
      return time_ticks != other.time_ticks ? time_ticks > other.time_ticks : number > other.number;
    }
  };

  std::int64_t as_ticks(double seconds) const;
  void submit(Resource resource, const SimulatedJob& job, double amount, double rate,
              double latency_s = 0);
  Line& write_line();
  void end_idleness(Line& line);
  std::int64_t cache_ticks(const Timed& timed);
  void take_up(Line& line);
  void enter(std::int64_t time_ticks, const SimulatedJob& job);

  const Rates& rates_;
  const StateFormat format_;
  const double ticks_per_s_;
  std::function<void(const SimulatedJob&)> on_end_;
  WriteCacheModel cache_;
  std::array<Line, kResourceCount> lines_;
  std::vector<Entry> calendar_;  // a heap; the next end is on top
  std::vector<Entry> ended_;
  std::int64_t now_ticks_ = 0;
  std::uint64_t entered_ = 0;
  Traffic traffic_;
  double host_memory_bytes_ = 0;  // that host memory has read and written
};

}  // namespace sluice
