// That the flows overlap as designed, read from the trace: order and nesting, never how long
// anything took.
#include <gtest/gtest.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <string_view>
#include <thread>
#include <utility>

#include <sluice/units.h>
#include "base/trace/trace_recorder.h"
#include "engine/engine_over_queue.h"
#include "engine/plan/layout.h"
#include "engine/run/task_thread.h"
#include "tests/support/fault_queue.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

std::vector<TraceRecord> of_kind(const std::vector<TraceRecord>& all, TraceKind kind) {
  std::vector<TraceRecord> chosen;
  std::ranges::copy_if(all, std::back_inserter(chosen),
                       [&](const TraceRecord& record) { return record.kind == kind; });
  return chosen;
}

// Runs one step with delayed transfers, so that order shows, and returns its records.
std::vector<TraceRecord> traced_step(Config config) {
  const auto device =
      make_host_device({.memory_bytes = *config.memory.device_bytes, .copy_bytes_per_second = 0});
  const ModelSpec model = toy_model();
  Engine engine = EngineOverQueue::make(config, model, *device, [](std::unique_ptr<IoQueue> queue) {
    return make_fault_queue(std::move(queue), {.seed = 3, .delay_us_max = 300});
  });
  engine.initialize(toy_values());
  const Stream stream(*device, "compute");
  trace_enable(4096);
  Step step = engine.begin_step({.learning_rate = 1e-3});
  walk_step(step, model, engine, *device, stream, config, 1);
  (void)step.finish();
  engine.drain();
  std::vector<TraceRecord> records = trace_take();
  trace_enable(0);
  return records;
}

// A serial step's writes: those during which another block is read, and all.
std::pair<std::size_t, std::size_t> overlapping_writes(const std::vector<TraceRecord>& records) {
  const std::uint64_t pass_begin = of_kind(records, TraceKind::kFinish)[0].begin_ns;
  auto reads = of_kind(records, TraceKind::kRead);
  std::erase_if(reads, [&](const TraceRecord& read) { return read.begin_ns < pass_begin; });
  const auto writes = of_kind(records, TraceKind::kWrite);
  const auto overlapping = std::ranges::count_if(writes, [&](const TraceRecord& write) {
    return std::ranges::any_of(reads, [&](const TraceRecord& read) {
      return read.block != write.block && read.begin_ns < write.end_ns &&
             write.begin_ns < read.end_ns;
    });
  });
  return {static_cast<std::size_t>(overlapping), writes.size()};
}

Config out_of_core(const TempDirectory& directory) {
  Config config = toy_config(directory.path());
  config.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config.memory.device_bytes = 400_KiB;
  config.memory.host_bytes = 2_MiB;
  return config;
}

TEST(Overlap, ReadsOfLaterUnitsStartBeforeTheirAcquire) {
  const TempDirectory directory;
  Config config = out_of_core(directory);
  config.storage.block_elements = 65536;  // one block a unit: the staging slots hold whole units
  const auto records = traced_step(config);
  const auto acquires = of_kind(records, TraceKind::kAcquire);
  const auto reads = of_kind(records, TraceKind::kRead);
  ASSERT_EQ(acquires.size(), 14u);
  const auto finish = of_kind(records, TraceKind::kFinish);
  ASSERT_EQ(finish.size(), 1u);
  // Each unit after the first that has to be fetched in forward begins to be read before
  // computation asks for it.
  for (std::size_t use = 1; use < 5; ++use) {
    const auto first_read = std::ranges::find_if(
        reads, [&](const TraceRecord& read) { return read.unit == acquires[use].unit; });
    ASSERT_NE(first_read, reads.end());
    EXPECT_LT(first_read->begin_ns, acquires[use].begin_ns) << "use " << use;
  }
}

TEST(Overlap, ThePassReadsAheadWhileEarlierBlocksAreUpdatedAndWritten) {
  const TempDirectory directory;
  Config config = out_of_core(directory);
  config.optimizer.overlap = OverlapPolicy::kSerial;
  // On a busy machine the next read may come late: then the step is repeated.
  for (int attempt = 0; attempt < 10; ++attempt) {
    const auto [overlapping, writes] = overlapping_writes(traced_step(config));
    ASSERT_GT(writes, 0u);
    if (overlapping > writes / 2) return;
  }
  FAIL() << "in none of ten steps half of the writes overlap a read";
}

TEST(Overlap, EveryBlockIsReadUpdatedAndWrittenOnceInThatOrder) {
  const TempDirectory directory;
  const auto records = traced_step(out_of_core(directory));
  const auto adams = of_kind(records, TraceKind::kAdam);
  const auto writes = of_kind(records, TraceKind::kWrite);
  const ModelSpec model = validated(toy_model());
  const Layout layout(model, state_format(Config()), 4096);
  ASSERT_EQ(adams.size(), layout.blocks().size());
  ASSERT_EQ(writes.size(), 2 * layout.blocks().size());
  for (const TraceRecord& adam : adams) {
    for (const TraceRecord& write : writes) {
      if (write.block == adam.block) {
        EXPECT_GE(write.begin_ns, adam.end_ns);
      }
    }
  }
}

// The worker, which is slow here, adds the gradient of the second micro-batch to that of the first.
TEST(Overlap, AStepThatWaitsForTheSumOfGradientsSaysOfWhichUnit) {
  const TempDirectory directory;
  const Config config = toy_config(directory.path());
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  const ModelSpec model = toy_model();
  Engine engine(config, model, *device);
  engine.initialize(toy_values());
  const Stream stream(*device, "compute");
  TaskThread::set_before_task([] {
    char name[16] = {};
    (void)::pthread_getname_np(::pthread_self(), name, sizeof name);
    if (std::string_view(name) == "sluice-work")
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
  });
  trace_enable(1 << 16);
  Step step = engine.begin_step({.learning_rate = 1e-3, .micro_batches = 2});
  walk_step(step, model, engine, *device, stream, config, 2);
  (void)step.finish();
  TaskThread::set_before_task(nullptr);
  engine.drain();
  const auto waits = of_kind(trace_take(), TraceKind::kWait);
  trace_enable(0);
  const UnitId last = validated(model).backward_order.back();
  EXPECT_TRUE(std::ranges::any_of(waits, [&](const TraceRecord& wait) {
    return wait.use == kTraceNone && wait.reason == TraceReason::kNorm &&
           wait.unit == index_of(last);
  }));
}

}  // namespace
}  // namespace sluice::test
