// The default budgets stand in one place. This program links its own in place of
// engine/plan/default_budgets.cc, and whatever makes a plan follows: without budgets in the config,
// each does what it does under a config that names them.
#include <gtest/gtest.h>

#include <array>
#include <fstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <sluice/config_document.h>
#include <sluice/engine.h>
#include <sluice/host_device.h>
#include <sluice/plan.h>
#include <sluice/units.h>
#include "base/topology.h"
#include "engine/engine_access.h"
#include "engine/plan/host_memory.h"
#include "engine/planner/order_choice.h"
#include "engine/run/engine_trace.h"
#include "tests/support/temp_directory.h"
#include "tests/tools/gpt/model/device_machine.h"
#include "tools/bench/gpu_bench.h"
#include "tools/bench/step_bench.h"
#include "tools/commands/plan_command.h"
#include "tools/commands/train_command.h"
#include "tools/gpt/train/run_memory.h"
#include "tools/gpt/train/train_config.h"
#include "tools/trace/trace_engine.h"
#include "tools/trace/trace_reader.h"
#include "tools/tune/trial.h"

namespace sluice {
namespace {

// This program's defaults, as parts of the machine's memory: so many that about `bytes` are left.
std::uint64_t part_of(std::uint64_t bytes) {
  return topology().memory_bytes / bytes;
}
struct Defaults {
  std::uint64_t device_part = 0;
  std::uint64_t host_part = 0;
  std::uint64_t device_bytes() const { return topology().memory_bytes / device_part; }
  std::uint64_t host_bytes() const { return topology().memory_bytes / host_part; }
};
const std::array<Defaults, 2> kDefaults{
    {{part_of(2_MiB), part_of(3_MiB)}, {part_of(3_MiB), part_of(2_MiB)}}};
Defaults defaults_now = kDefaults[0];

}  // namespace

std::uint64_t default_device_bytes(std::uint64_t memory_bytes) {
  return memory_bytes / defaults_now.device_part;
}

std::uint64_t default_host_bytes(std::uint64_t memory_bytes) {
  return memory_bytes / defaults_now.host_part;
}

std::uint64_t memory_of_default_host(std::uint64_t budget_bytes) {
  return budget_bytes * defaults_now.host_part;
}

namespace {

using Told = std::vector<std::uint64_t>;

// A config file and its text, without budgets or with the defaults as its budgets.
class Job {
 public:
  explicit Job(bool names_budgets) {
    write_random_tokens(folder_.file("tokens"), 256, 4096);
    nlohmann::json config = {
        {"model",
         {{"layers", 4},
          {"heads", 2},
          {"embedding", 64},
          {"context", 8},
          {"vocabulary", 256},
          {"tied_head", false}}},
        {"batch", {{"sequences", 2}, {"micro_batches", 2}, {"order", "horizontal"}}},
        {"data", {{"file", folder_.file("tokens")}, {"format", "uint16"}}},
        {"activations", "recompute"},
        {"optimizer", {{"overlap", "deferred"}, {"lanes", 2}}},
        {"storage", {{"paths", {folder_.path()}}, {"block_elements", 4096}, {"backend", "sync"}}},
        {"run", {{"device", "host"}, {"threads", 1}, {"steps", 3}}}};
    if (names_budgets)
      config["memory"] = {{"device", std::to_string(defaults_now.device_bytes())},
                          {"host", std::to_string(defaults_now.host_bytes())}};
    std::ofstream(file()) << config.dump();
    config_ = train_config(ConfigDocument(config.dump(), "a test"));
  }

  std::string file(const std::string& name = "config.json") const { return folder_.file(name); }
  const TrainConfig& config() const { return config_; }
  const Config& engine() const { return config_.engine; }
  ModelSpec model() const { return validated(training_model(config_)); }

 private:
  test::TempDirectory folder_;
  TrainConfig config_;
};

Told library_plan(const Job& job) {
  const Plan planned = plan(job.engine(), job.model(), this_machine(job.engine()));
  return {planned.device_budget_bytes, planned.host_budget_bytes, planned.host_bytes,
          planned.nvme_bytes, planned.traffic.nvme_read_bytes};
}

Told engine(const Job& job) {
  const auto device = make_host_device({.memory_bytes = host_device_bytes(job.engine())});
  const Engine made(job.engine(), job.model(), *device);
  const Placement& placement = placement_of(made);
  return {placement.device_budget_bytes, placement.host_budget_bytes, placement.host_bytes(),
          placement.nvme_bytes()};
}

Told order_choice(const Job& job) {
  const HostMemory host = share_of_host(/*device_is_host=*/true, /*activation_bytes=*/0, 1);
  Config config = job.engine();
  settle_budgets(config.memory, host);
  Told told;
  for (const OrderPlan& order : plan_orders(config, job.model(), machine_of(host, 1))) {
    EXPECT_EQ(order.obstacle, "");
    told.push_back(order.traffic.nvme_read_bytes + order.traffic.nvme_write_bytes);
    told.push_back(order.copied_bytes);
  }
  return told;
}

Told tune_trial(const Job& job) {
  return {run_trial(job.config(), 1, [](unsigned) {}).device_budget_bytes};
}

// On a GPU, the device's budget is the GPU's memory; here it is named.
Told gpu_bench(const Job& job) {
  TrainConfig config = job.config();
  config.engine.memory.device_bytes = 1_MiB;
  config.engine.activations.home = ActivationHome::kKeep;
  const Config::Precision& precision = config.engine.precision;
  const gpt::DeviceMachine machine =
      gpt::host_machine().make(precision.parameters, precision.gradients);
  const TrainingBench step = bench_training(config, *machine.device, *machine.ops, 1, Rates{});
  return {step.host_pool_bytes, step.nvme_bytes};
}

Told plan_command(const Job& job) {
  PlanOptions options;
  options.config_file = job.file();
  options.json_file = job.file("plan.json");
  EXPECT_EQ(run_plan(options), 0);
  std::ifstream file(job.file("plan.json"));
  const nlohmann::json told = nlohmann::json::parse(file).at("placements").at(0);
  return {told.at("device_bytes"), told.at("host_bytes"), told.at("nvme_bytes")};
}

// With the trace, which says to `trace whatif` what the run's budgets were.
Told train_command(const Job& job) {
  TrainOptions options;
  options.config_file = job.file();
  options.trace_file = job.file("run.trace");
  options.quiet = true;
  EXPECT_EQ(run_train(options), 0);
  const TraceFile file = read_trace(options.trace_file);
  const TracedEngine traced = engine_of(file);
  const Config::Memory replayed = config_of_trace(file.sections.at("engine")).memory;
  EXPECT_EQ(replayed.device_bytes, traced.device_budget_bytes);
  EXPECT_EQ(replayed.host_bytes, traced.host_budget_bytes);
  EXPECT_EQ(traced.device_budget_bytes, defaults_now.device_bytes());
  EXPECT_EQ(traced.host_budget_bytes, defaults_now.host_bytes());
  return {traced.device_bytes, traced.host_bytes, traced.nvme_bytes};
}

struct User {
  const char* name;
  Told (*told)(const Job& job);
};

void PrintTo(const User& user, std::ostream* out) {
  *out << user.name;
}

class DefaultBudgets : public testing::TestWithParam<User> {};

TEST_P(DefaultBudgets, AreDecidedInOnePlace) {
  std::vector<Told> told;
  for (const Defaults& defaults : kDefaults) {
    defaults_now = defaults;
    told.push_back(GetParam().told(Job(/*names_budgets=*/false)));
    EXPECT_EQ(told.back(), GetParam().told(Job(/*names_budgets=*/true)))
        << "under a config that names them";
  }
  EXPECT_NE(told[0], told[1]) << "two defaults that change nothing prove nothing";
}

INSTANTIATE_TEST_SUITE_P(Users, DefaultBudgets,
                         testing::ValuesIn(std::vector<User>{{"library_plan", library_plan},
                                                             {"engine", engine},
                                                             {"order_choice", order_choice},
                                                             {"tune_trial", tune_trial},
                                                             {"gpu_bench", gpu_bench},
                                                             {"plan_command", plan_command},
                                                             {"train_command", train_command}}),
                         [](const testing::TestParamInfo<User>& user) {
                           return std::string(user.param.name);
                         });

// The bench names the device's budget, and takes the host's as it comes.
TEST(DefaultBudgetOfStepBench, IsTheEngines) {
  const test::TempDirectory folder;
  for (const Defaults& defaults : kDefaults) {
    defaults_now = {.device_part = defaults.device_part, .host_part = defaults.host_part / 16};
    StepBenchModel model;
    model.parameters = 200'000;
    model.units = 4;
    model.path = folder.path();
    model.memory_share = 1;
    StepBench bench(model, OverlapPolicy::kDeferred, Rates{});
    EXPECT_EQ(placement_of(bench.engine()).host_budget_bytes, defaults_now.host_bytes());
  }
}

}  // namespace
}  // namespace sluice
