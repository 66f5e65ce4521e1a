// Traces of the real engine over real files: what they say adds up with what the engine counted.
#include <gtest/gtest.h>

#include <algorithm>

#include <nlohmann/json.hpp>

#include <sluice/detached_optimizer.h>
#include <sluice/units.h>
#include "engine/plan/sharding.h"
#include "engine/planner/run_plan.h"
#include "engine/run/engine_trace.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"
#include "tools/trace/trace_analysis.h"
#include "tools/trace/trace_engine.h"
#include "tools/trace/trace_steps.h"
#include "tools/trace/trace_summary.h"

namespace sluice::test {
namespace {

std::uint64_t counted_bytes(const TraceFile& file, TraceKind kind) {
  std::uint64_t sum = 0;
  for (const TraceRecord& record : file.records) sum += record.kind == kind ? record.size_bytes : 0;
  return sum;
}

// The most bytes of units that were in the window at one time.
std::uint64_t resident_bytes_max(const TraceFile& file) {
  std::vector<std::pair<std::uint64_t, std::int64_t>> changes;
  for (const TraceRecord& record : file.records) {
    if (record.kind != TraceKind::kResident) continue;
    changes.emplace_back(record.begin_ns, static_cast<std::int64_t>(record.size_bytes));
    changes.emplace_back(record.end_ns, -static_cast<std::int64_t>(record.size_bytes));
  }
  std::ranges::sort(changes);
  std::int64_t now = 0, most = 0;
  for (const auto& [time_ns, bytes] : changes) most = std::max(most, now += bytes);
  return static_cast<std::uint64_t>(most);
}

class TracedPolicy : public testing::TestWithParam<OverlapPolicy> {};

TEST_P(TracedPolicy, AddsUpWithTheEngine) {
  const TempDirectory directory;
  Config config = toy_config(directory.path());
  config.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config.memory.device_bytes = 400_KiB;
  config.memory.host_bytes = 2_MiB;
  config.optimizer.overlap = GetParam();
  if (GetParam() == OverlapPolicy::kEager) config.optimizer.clip_norm = 0;
  const std::string path = directory.path() + "/toy.trace";
  trace_start({.file = path});
  const ToyResult result = run_toy(config, {.steps = 4, .micro_batches = 2, .evaluate = true});
  EXPECT_EQ(trace_stop().lost, 0u);

  const TraceFile file = read_trace(path);
  const auto counters = nlohmann::json::parse(file.sections.at("store"));
  EXPECT_EQ(counted_bytes(file, TraceKind::kRead), counters.at("read_bytes").get<std::uint64_t>());
  EXPECT_EQ(counted_bytes(file, TraceKind::kWrite),
            counters.at("write_bytes").get<std::uint64_t>());
  const auto engine = nlohmann::json::parse(file.sections.at("engine"));
  EXPECT_GT(resident_bytes_max(file), 0u);
  EXPECT_LE(resident_bytes_max(file), engine.at("memory").at("window_bytes").get<std::uint64_t>());

  const TraceAnalysis analysis(file);
  ASSERT_EQ(analysis.steps().size(), result.reports.size());
  bool was_drained = false;
  for (std::size_t i = 0; i < result.reports.size(); ++i) {
    StepTimes times = result.reports[i].times;
    const StepShare& step = analysis.steps()[i];
    EXPECT_EQ(times.total_ns,
              times.compute_ns + times.exposed_io_ns + times.exposed_optimizer_ns + times.other_ns);
    EXPECT_GE(times.other_ns, 0);
    EXPECT_GE(times.stall_ns, times.stall_for_update_ns);
    EXPECT_GT(times.work.any_ns, 0);
    EXPECT_LE(times.work.busy(Work::kStorage), times.work.any_ns);
    // The evaluation after the step waits for the rest of the update, but the last one.
    const bool is_last = i + 1 == result.reports.size();
    if (is_last || GetParam() == OverlapPolicy::kSerial) {
      EXPECT_EQ(step.drained_ns, 0);
    }
    EXPECT_EQ(step.end_ns - step.begin_ns, static_cast<std::uint64_t>(times.total_ns));
    times.total_ns += step.drained_ns;
    times.exposed_optimizer_ns += step.drained_ns;
    times.work.any_ns += step.drained_ns;
    was_drained = was_drained || step.drained_ns != 0;
    // The trace says the same, to the nanosecond.
    EXPECT_EQ(step.step, result.reports[i].step);
    EXPECT_EQ(step.total_ns(), times.total_ns);
    EXPECT_EQ(step.compute_ns, times.compute_ns);
    EXPECT_EQ(step.exposed_io_ns, times.exposed_io_ns);
    EXPECT_EQ(step.exposed_optimizer_ns, times.exposed_optimizer_ns);
    EXPECT_EQ(step.other_ns, times.other_ns);
    EXPECT_EQ(step.background_ns, static_cast<std::uint64_t>(times.work.any_ns));
    EXPECT_EQ(step.hidden_ns(), times.hidden_ns());
    EXPECT_DOUBLE_EQ(means_of({step}).hidden_share(), times.hidden_share());
  }
  EXPECT_EQ(was_drained, GetParam() != OverlapPolicy::kSerial);
  for (const Stall& stall : analysis.stalls()) EXPECT_LE(stall.begin_ns, stall.end_ns);
  std::vector<TraceAnalysis> ranks;
  ranks.emplace_back(file);
  EXPECT_LE(std::ranges::count(summary_of(ranks, {}), '\n'), 40);
}

INSTANTIATE_TEST_SUITE_P(All, TracedPolicy,
                         testing::Values(OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                         OverlapPolicy::kEager, OverlapPolicy::kSpeculative),
                         [](const auto& test) { return std::string(name_of(test.param)); });

// An optimizer alone has no steps; its summary says how its updates went.
TEST(TracedOptimizer, IsSummarisedWithoutSteps) {
  const TempDirectory directory;
  Config config;
  config.placement.optimizer = TierChoice::kNvme;
  config.memory.host_bytes = 300_KiB;
  config.storage.paths = {directory.path()};
  config.storage.block_elements = 4096;
  config.threads = 1;
  const std::string path = directory.path() + "/optimizer.trace";
  trace_start({.file = path});
  {
    DetachedOptimizer optimizer(config, {{.name = "t", .element_count = 40'000}});
    std::vector<float> parameter(40'000, 0.5f), gradient(40'000, 0.25f);
    for (std::uint64_t step = 1; step <= 3; ++step) {
      const std::vector<DetachedUpdate> updates{{.tensor = 0,
                                                 .parameter = parameter.data(),
                                                 .gradient = gradient.data(),
                                                 .step = step,
                                                 .learning_rate = 1e-3,
                                                 .adam = {}}};
      optimizer.begin(updates);
      optimizer.wait_all();
    }
  }
  EXPECT_EQ(trace_stop().lost, 0u);
  const TraceFile file = read_trace(path);
  std::vector<TraceAnalysis> ranks;
  ranks.emplace_back(file);
  const std::string text = summary_of(ranks, {});
  EXPECT_NE(text.find("30 updates of blocks: "), std::string::npos) << text;  // 3 of 10 blocks
  for (const char* word :
       {"at work in the ", "updates and norms ", "storage ", "read drive 0", "write drive 0"})
    EXPECT_NE(text.find(word), std::string::npos) << word << "\n" << text;
}

// The section's description of config and model plans the same placement again.
TEST(TracedEngineText, PlansTheSameEngine) {
  const TempDirectory directory;
  Config config = toy_config(directory.path());
  config.memory.device_bytes = 400_KiB;
  config.memory.host_bytes = 2_MiB;
  config.optimizer.overlap = OverlapPolicy::kDeferred;
  config.activations = {.home = ActivationHome::kNvme, .micro_batches = 3};
  ModelSpec spec = toy_model();
  spec = validated(spec);
  spec.boundary_bytes.assign(spec.forward_order.size() - 1, 8192);
  const ModelSpec model = validated(spec);
  config.sharding.keep_gathered_bytes = 40'000;
  const Layout layout = plan_layout(config, model, shard_of(config.sharding, /*rank=*/1, 3));
  const Placement placement =
      plan_run(config, model, layout, {.ranks = 3, .device_is_host = false}).placement;
  const std::string text = describe_engine(config, model, layout, placement, /*ranks=*/3, 4);
  const ModelSpec model_again = model_of_trace(text);
  Config config_again = config_of_trace(text);
  EXPECT_TRUE(lanes_of_trace_are_planned(text));
  config_again.optimizer.lanes.reset();
  const Layout layout_again = plan_layout(config_again, model_again, shard_of_trace(text));
  const Placement again =
      plan_run(config_again, model_again, layout_again, machine_of_trace(text)).placement;
  EXPECT_EQ(describe_engine(config_again, model_again, layout_again, again,
                            machine_of_trace(text).ranks, 4),
            text);
  EXPECT_EQ(again, placement);
  EXPECT_GT(again.nvme_activation_bytes, 0u);
  EXPECT_LT(layout_again.unit(UnitId{0}).shard_elements,
            layout_again.unit(UnitId{0}).element_count);
}

}  // namespace
}  // namespace sluice::test
