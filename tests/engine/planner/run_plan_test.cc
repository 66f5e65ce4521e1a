// The plan of a run, made without an engine, is that of the engine, field by field; and the parts
// of the machine that it depends on.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <sluice/engine.h>
#include <sluice/host_device.h>
#include <sluice/plan.h>
#include <sluice/units.h>
#include "base/memory_room.h"
#include "base/topology.h"
#include "engine/engine_access.h"
#include "engine/plan/sharding.h"
#include "engine/planner/run_plan.h"
#include "io/direct_file.h"
#include "tests/support/campaign.h"
#include "tests/support/expect_error.h"
#include "tests/support/many_ranks.h"
#include "tests/support/random_run.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

constexpr std::uint64_t kDeviceBytes = 64_MiB;

// Where less is free than the default budget of the host, the default is what is free, and another
// at each look. host_memory_test.cc tests it.
bool default_budget_is_steady() {
  return memory_room().size_bytes > topology().memory_bytes / 2 + 2_GiB;
}

// The random run with all that a config says beside it: budgets or none, every policy, groups of
// parameters.
Config config_of(RandomRun& run, const std::string& path) {
  Config config = run.config();
  config.storage.paths = {path};
  config.storage.backend = IoBackend::kSync;
  config.threads = 1;
  config.optimizer.overlap = static_cast<OverlapPolicy>(run.below(5));
  if (run.one_in(2)) config.optimizer.clip_norm = 0;
  if (config.optimizer.overlap == OverlapPolicy::kEager) config.optimizer.clip_norm = 0;
  if (run.one_in(3)) config.optimizer.groups = {{.tensors = {"u0.*"}, .learning_rate_factor = 2}};
  const auto budget = [&]() -> std::optional<std::uint64_t> {
    if (run.one_in(3)) return std::nullopt;
    return run.one_in(3) ? kDeviceBytes : run.any_magnitude(4e7);
  };
  config.memory = {.device_bytes = budget(), .host_bytes = budget()};
  return config;
}

std::string text_of(const std::vector<Pool>& pools) {
  std::string text;
  for (const Pool& pool : pools)
    text +=
        fmt::format("{} {} {} {}\n", name_of(pool.tier), pool.name, pool.size_bytes, pool.reason);
  return text;
}

std::string text_of(const Traffic& traffic) {
  return fmt::format("{} {} {} {} {} {}", traffic.nvme_read_bytes, traffic.nvme_write_bytes,
                     traffic.nvme_read_bytes_least, traffic.activation_out_bytes,
                     traffic.activation_in_bytes, traffic.gradient_spill_bytes);
}

template <class Make>
auto made_or_refused(const Make& make, std::string& refusal) -> std::optional<decltype(make())> {
  try {
    return make();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory) << error.what();
    refusal = error.what();
    return std::nullopt;
  }
}

// Whether there is a plan.
bool expect_the_engines_plan(const Config& config, const ModelSpec& model, RunMachine machine) {
  machine.device_bytes = kDeviceBytes;
  // The ranks share one host.
  machine.host_memory_bytes = topology().memory_bytes / machine.ranks;
  machine.free_bytes = free_bytes;
  std::string refusal, engine_refusal;
  const std::optional<Plan> planned =
      made_or_refused([&] { return plan(config, model, machine); }, refusal);
  const auto device =
      make_host_device({.memory_bytes = kDeviceBytes, .has_own_memory = !machine.device_is_host});
  ManyRanks ranks(*device, /*rank=*/0, machine.ranks);
  Collectives* const collectives = machine.ranks == 1 ? nullptr : &ranks;
  const auto engine =
      made_or_refused([&] { return std::make_unique<Engine>(config, model, *device, collectives); },
                      engine_refusal);
  EXPECT_EQ(refusal, engine_refusal);
  if (!planned || !engine) return false;
  const Layout layout =
      plan_layout(config, model, shard_of(config.sharding, /*rank=*/0, machine.ranks));
  const Placement& placement = placement_of(**engine);
  EXPECT_EQ(plan_run(config, model, layout, machine).placement, placement);
  EXPECT_EQ(planned->device_budget_bytes, placement.device_budget_bytes);
  EXPECT_EQ(planned->host_budget_bytes, placement.host_budget_bytes);
  EXPECT_EQ(planned->device_bytes, placement.device_bytes());
  EXPECT_EQ(planned->host_bytes, placement.host_bytes());
  EXPECT_EQ(planned->nvme_bytes, placement.nvme_bytes());
  EXPECT_EQ(text_of(planned->pools), text_of(placement.pools()));
  EXPECT_EQ(text_of(planned->traffic),
            text_of((*engine)->predicted_traffic(config.activations.micro_batches,
                                                 config.activations.order)));
  return true;
}

TEST(RunPlan, IsTheEnginesPlan) {
  std::uint64_t plans = 0, refusals = 0, replaced = 0;
  for (const std::uint64_t seed : seeds_of(campaign(500))) {
    RandomRun run(seed);
    const TempDirectory directory;
    Config config = config_of(run, directory.path());
    if (!config.memory.host_bytes && !default_budget_is_steady()) {
      config.memory.host_bytes = 1_GiB;
      ++replaced;
    }
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, run.describe()));
    ++(expect_the_engines_plan(config, run.model(), run.machine()) ? plans : refusals);
    if (HasFailure()) return;
  }
  if (replaced != 0)
    fmt::print(
        "{} cases without a budget of the host were compared with 1 GiB: too little memory is "
        "free here for a steady default\n",
        replaced);
  EXPECT_GT(3 * plans, refusals) << "both have to be compared";
  EXPECT_GT(3 * refusals, plans) << "both have to be compared";
}

ModelSpec one_unit() {
  ModelSpec model;
  model.units = {{.name = "unit", .tensors = {{.name = "weight", .shape = {1 << 20}}}}};
  return model;
}

TEST(RunPlan, BudgetsThatTheConfigDoesNotNameAreTheMachines) {
  const Plan planned = plan({}, one_unit(), {.device_bytes = 48_MiB, .host_memory_bytes = 3_GiB});
  EXPECT_EQ(planned.device_budget_bytes, 48_MiB);
  EXPECT_EQ(planned.host_budget_bytes, 3_GiB / 2);
  const RunMachine here = this_machine({});
  EXPECT_GT(here.device_bytes, 0u);
  EXPECT_LE(here.device_bytes, topology().memory_bytes / 4);
  EXPECT_LE(here.host_memory_bytes, topology().memory_bytes);
  EXPECT_LE(here.device_bytes + here.host_memory_bytes / 2, memory_room().size_bytes + 64_MiB);
  Config config;
  config.memory.device_bytes = 5_MiB;
  EXPECT_EQ(host_device_bytes(config), 5_MiB);
}

TEST(RunPlan, AutoSpeculatesOnlyWhereTheDrivesHaveRoomForBothCopies) {
  Config config;
  config.placement = {.parameters = TierChoice::kNvme, .optimizer = TierChoice::kNvme};
  RunMachine machine{.host_memory_bytes = 1_GiB};
  const Plan roomy = plan(config, one_unit(), machine);
  EXPECT_EQ(roomy.policy, OverlapPolicy::kSpeculative);
  // Twice the state, and as much again.
  std::uint64_t room = 2 * roomy.nvme_bytes;
  machine.free_bytes = [&](const std::string& path) {
    EXPECT_EQ(path, config.storage.paths.front());
    return room;
  };
  EXPECT_EQ(plan(config, one_unit(), machine).policy, OverlapPolicy::kSpeculative);
  --room;
  const Plan tight = plan(config, one_unit(), machine);
  EXPECT_EQ(tight.policy, OverlapPolicy::kDeferred);
  EXPECT_EQ(2 * tight.nvme_bytes, roomy.nvme_bytes);
  config.optimizer.clip_norm = 0;
  EXPECT_EQ(plan(config, one_unit(), machine).policy, OverlapPolicy::kEager);
}

// Sixty-four blocks, of which the budget brings more and more records home.
TEST(RunPlan, AutoSpeculatesWhereNearlyAllOfTheStateHasACopy) {
  Config config;
  config.storage.block_elements = 1 << 14;
  config.optimizer.lanes = 4;
  config.placement = {.parameters = TierChoice::kNvme, .optimizer = TierChoice::kAuto};
  const ModelSpec model = validated(one_unit());
  const Layout layout = plan_layout(config, model);
  ASSERT_EQ(layout.blocks().size(), 64u);
  const RunMachine machine{.host_memory_bytes = 1_GiB};
  std::array<int, 65> by_records_at_home{};
  for (std::uint64_t budget = 3_MiB; budget < 16_MiB; budget += 80_KiB) {
    config.memory = {.device_bytes = 16_MiB, .host_bytes = budget};
    for (const bool is_durable : {false, true}) {
      config.storage.state.name = is_durable ? "run" : "";
      const RunPlan planned = plan_run(config, model, layout, machine);
      const auto at_home =
          static_cast<std::size_t>(std::ranges::count(planned.placement.record_tier, Tier::kHost));
      EXPECT_EQ(planned.policy, at_home <= (is_durable ? 0 : 8) ? OverlapPolicy::kSpeculative
                                                                : OverlapPolicy::kDeferred)
          << at_home << " of 64 records in host memory";
      EXPECT_EQ(planned.placement.shadow_bytes != 0, planned.policy == OverlapPolicy::kSpeculative);
      if (!is_durable) ++by_records_at_home[at_home];
    }
  }
  for (const std::size_t at_home : {0, 1, 8, 9, 32, 64})
    EXPECT_GT(by_records_at_home[at_home], 0) << at_home;
}

TEST(RunPlan, RefusesWhatAnEngineRefuses) {
  Config config;
  config.optimizer.groups = {{.tensors = {"bias"}, .learning_rate_factor = 2}};
  const std::string message =
      expect_error(ErrorCode::kConfig, [&] { (void)plan(config, one_unit(), {}); });
  EXPECT_NE(message.find("bias"), std::string::npos) << message;
  EXPECT_NE(expect_error(ErrorCode::kInvalidArgument, [] { (void)plan({}, {}, {}); }), "");
}

}  // namespace
}  // namespace sluice::test
