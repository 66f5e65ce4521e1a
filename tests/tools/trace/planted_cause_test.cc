// Waits of the real engine over real files, whose cause is planted. Which waits come about is up to
// the machine. So each case looks in the trace's records for waits that can have only the planted
// cause, and repeats the run until there is one. Each of them has to be judged accordingly.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include <sluice/units.h>
#include "engine/engine_over_queue.h"
#include "io/throttled_queue.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"
#include "tools/trace/trace_analysis.h"

namespace sluice::test {
namespace {

// Eight units of 64 Ki parameters each in emulated computation.
struct Plant {
  OverlapPolicy policy = OverlapPolicy::kDeferred;
  std::uint64_t compute_ns = 0;  // of each use
  ThrottleOptions throttle = {};
  std::optional<std::uint32_t> lanes = {};
  std::uint64_t elements = 64 << 10;
  TierChoice home = TierChoice::kNvme;
  std::uint64_t pause_ns = 0;     // before each step
  bool changes_schedule = false;  // the last step's forward begins with the last unit
};

TraceFile planted(const Plant& plant) {
  const TempDirectory directory;
  ModelSpec model;
  for (int i = 0; i < 8; ++i)
    model.units.push_back(
        {.name = "u" + std::to_string(i),
         .tensors = {{.name = "t" + std::to_string(i), .shape = {plant.elements}}}});
  model = validated(model);
  Config config;
  config.optimizer.overlap = plant.policy;
  config.optimizer.lanes = plant.lanes;
  config.placement = {plant.home, plant.home};
  config.storage.paths = {directory.path()};
  config.storage.block_elements = 64 << 10;
  config.memory.device_bytes = 5 * plant.elements * 2 + 64_KiB;
  config.threads = 1;
  const std::string path = directory.path() + "/plant.trace";
  trace_start({.file = path});
  {
    const auto device =
        make_host_device({.memory_bytes = *config.memory.device_bytes, .copy_bytes_per_second = 0});
    Engine engine =
        EngineOverQueue::make(config, model, *device, [&](std::unique_ptr<IoQueue> queue) {
          return make_throttled_queue(std::move(queue), plant.throttle);
        });
    engine.initialize([](const TensorPlace&, std::uint64_t, std::span<float> values) {
      std::ranges::fill(values, 0.5f);
    });
    const Stream stream(*device, "compute");
    for (int i = 0; i < 3; ++i) {
      std::this_thread::sleep_for(std::chrono::nanoseconds(plant.pause_ns));
      Step step = engine.begin_step({.learning_rate = 1e-3});
      for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
        std::vector<UnitId> order =
            pass == Pass::kForward ? model.forward_order : model.backward_order;
        if (plant.changes_schedule && i == 2 && pass == Pass::kForward)
          std::ranges::rotate(order, order.end() - 1);
        for (const UnitId unit : order) {
          const Lease lease = step.acquire(unit, pass, stream);
          if (plant.compute_ns != 0) device->occupy(stream.id(), plant.compute_ns);
        }
      }
      (void)step.finish();
    }
    engine.drain();
  }
  EXPECT_EQ(trace_stop().lost, 0u);
  return read_trace(path);
}

constexpr std::uint64_t kMs = 1'000'000;

bool is_transfer(const TraceRecord& record) {
  return record.kind == TraceKind::kRead || record.kind == TraceKind::kWrite;
}

// A transfer has ended for the drive when its bytes have moved.
std::uint64_t end_of(const TraceRecord& record) {
  return is_transfer(record) ? record.moved_ns : record.end_ns;
}

// A stretch of time, and what the records say of it.
class Stretch {
 public:
  Stretch(const TraceFile& trace, std::uint64_t begin_ns, std::uint64_t end_ns)
      : trace_(trace), begin_ns_(begin_ns), end_ns_(end_ns) {}

  // The fewest and the most of the chosen records that are under way at one time.
  struct Depth {
    std::size_t least = 0;
    std::size_t most = 0;
  };
  template <class Choose>
  Depth depth(const Choose& choose) const {
    std::vector<std::uint64_t> instants{begin_ns_};
    std::vector<const TraceRecord*> chosen;
    for (const TraceRecord& record : trace_.records) {
      if (!choose(record) || end_of(record) <= begin_ns_ || record.begin_ns >= end_ns_) continue;
      chosen.push_back(&record);
      instants.push_back(std::max(record.begin_ns, begin_ns_));
      if (end_of(record) < end_ns_) instants.push_back(end_of(record));
    }
    Depth depth{.least = chosen.size()};
    for (const std::uint64_t instant : instants) {
      const auto count =
          static_cast<std::size_t>(std::ranges::count_if(chosen, [&](const TraceRecord* record) {
            return record->begin_ns <= instant && instant < end_of(*record);
          }));
      depth.least = std::min(depth.least, count);
      depth.most = std::max(depth.most, count);
    }
    return depth;
  }

 private:
  const TraceFile& trace_;
  std::uint64_t begin_ns_, end_ns_;
};

// The read that `wait` of computation for a unit's parameters ended with, if nothing but the drive
// can have made it late: its checksum took less than half of the wait.
const TraceRecord* read_of(const TraceFile& trace, const TraceRecord& wait) {
  for (const TraceRecord& record : trace.records) {
    if (record.kind != TraceKind::kRead || record.block != wait.block ||
        record.detail != kTraceParameters || record.begin_ns >= wait.end_ns ||
        record.end_ns <= wait.begin_ns)
      continue;
    const bool was_checksum = 2 * (record.end_ns - record.moved_ns) > wait.end_ns - wait.begin_ns;
    return was_checksum ? nullptr : &record;
  }
  return nullptr;
}

using IsPlanted = std::function<bool(const TraceFile& trace, const TraceRecord& wait)>;

// Judges the waits that `is_planted` finds, in the first of many runs that has any.
void expect_named(StallCause cause, const Plant& plant, const IsPlanted& is_planted) {
  std::string seen;  // where there are none, the waits that there are
  for (int attempt = 0; attempt < 30; ++attempt) {
    const TraceFile trace = planted(plant);
    const TraceAnalysis analysis(trace);
    bool is_found = false;
    seen.clear();
    for (const Stall& stall : analysis.stalls()) {
      if (stall.is_of_pass) continue;
      seen +=
          fmt::format("step {}, unit {}: reason {}, {}\n", stall.record->step, stall.record->unit,
                      static_cast<int>(stall.record->reason), name_of(stall.cause));
      if (!is_planted(trace, *stall.record)) continue;
      is_found = true;
      EXPECT_EQ(name_of(stall.cause), name_of(cause))
          << "step " << stall.record->step << ", unit " << stall.record->unit;
    }
    if (is_found) return;
  }
  FAIL() << "the planted cause has not come about; the last run's waits:\n" << seen;
}

// The drive had others to serve, until its turn came or from before the read was asked for.
TEST(PlantedCause, AThrottledDrive) {
  const auto is_behind_others = [](const TraceFile& trace, const TraceRecord& wait) {
    if (wait.reason != TraceReason::kRead) return false;
    const TraceRecord* const read = read_of(trace, wait);
    if (read == nullptr) return false;
    const auto is_other = [&](const TraceRecord& r) { return is_transfer(r) && &r != read; };
    const std::uint64_t wait_ns = wait.end_ns - wait.begin_ns;
    if (read->started_ns - read->begin_ns >= wait_ns)
      return Stretch(trace, read->begin_ns, read->started_ns).depth(is_other).least >= 1;
    return Stretch(trace, read->begin_ns - wait_ns, read->begin_ns).depth(is_other).least >= 2;
  };
  expect_named(StallCause::kBandwidth,
               {.throttle = {.read_bytes_per_second = 40'000'000,
                             .write_bytes_per_second = 40'000'000,
                             .duplex = Duplex::kHalf}},
               is_behind_others);
}

// Under serial nothing is under way when a step begins: its first read is late. The pause takes the
// update before out of sight.
TEST(PlantedCause, OneLatePrefetch) {
  const auto is_late = [](const TraceFile& trace, const TraceRecord& wait) {
    if (wait.reason != TraceReason::kRead || wait.unit != 0) return false;
    const TraceRecord* const read = read_of(trace, wait);
    if (read == nullptr) return false;
    const Stretch before(trace, read->begin_ns - (wait.end_ns - wait.begin_ns), read->begin_ns);
    return before.depth(is_transfer).most == 0;
  };
  expect_named(StallCause::kLatePrefetch,
               {.policy = OverlapPolicy::kSerial,
                .compute_ns = 30 * kMs,
                .throttle = {.latency_ns = 20 * kMs},
                .pause_ns = 100 * kMs},
               is_late);
}

// The only lane is on its way: the drive never has more than its two planes to read or to write,
// and no processor is at work.
TEST(PlantedCause, AStarvedPool) {
  const auto is_starved = [](const TraceFile& trace, const TraceRecord& wait) {
    if (wait.reason != TraceReason::kUpdateLane) return false;
    const Stretch whole(trace, wait.begin_ns, wait.end_ns);
    return whole.depth(is_transfer).most <= 2 &&
           whole.depth([](const TraceRecord& r) { return r.kind == TraceKind::kAdam; }).most == 0;
  };
  expect_named(StallCause::kNoBuffer, {.throttle = {.latency_ns = 10 * kMs}, .lanes = 1},
               is_starved);
}

TEST(PlantedCause, AChangedSchedule) {
  const TraceFile file = planted({.policy = OverlapPolicy::kSerial,
                                  .throttle = {.latency_ns = 20 * kMs},
                                  .changes_schedule = true});
  const TraceAnalysis analysis(file);
  const auto is_first_use_of_last_unit = [](const Stall& stall) {
    return stall.cause == StallCause::kSchedule && stall.record->step == 3 &&
           stall.record->use == 0;
  };
  EXPECT_TRUE(std::ranges::any_of(analysis.stalls(), is_first_use_of_last_unit));
  for (const Stall& stall : analysis.stalls()) {
    if (stall.record->step < 3) {
      EXPECT_NE(stall.cause, StallCause::kSchedule);
    }
  }
}

// Everything is in memory, and the step waits for its blocks' updates.
TEST(PlantedCause, ASlowAdam) {
  const auto is_for_adam = [](const TraceFile& trace, const TraceRecord& wait) {
    return wait.reason == TraceReason::kUpdate &&
           std::ranges::any_of(trace.records, [&](const TraceRecord& record) {
             return record.kind == TraceKind::kAdam && record.begin_ns >= wait.begin_ns &&
                    record.end_ns <= wait.end_ns;
           });
  };
  expect_named(StallCause::kAdam,
               {.policy = OverlapPolicy::kSerial, .elements = 2 << 20, .home = TierChoice::kHost},
               is_for_adam);
}

}  // namespace
}  // namespace sluice::test
