#include "tools/bench/step_regimes.h"

#include <set>

#include <fmt/format.h>

#include <sluice/units.h>
#include "base/topology.h"
#include "cpu_optim/cpu_optimizer.h"
#include "engine/store/block_store.h"
#include "engine/store/storage_queue.h"
#include "tools/bench/io_bench.h"
#include "tools/cli/interrupt.h"
#include "tools/report/median.h"
#include "tools/report/state_hash.h"

namespace sluice {
namespace {

constexpr unsigned kWarmSteps = 2;
constexpr unsigned kStepsARound = 4;
constexpr double kLatencyS = 100e-6;
// Backward computes twice what forward does.
constexpr double kForwardShare = 1.0 / 3;
constexpr std::uint64_t kBareFileBytes = 256_MiB;

struct Regime {
  std::string_view name;
  double of_storage_s;        // computation, by the time of the ideal traffic
  double of_adam_s = 0;       // or by that of one update; then all state is in memory
  double adam_share = 0;      // of Adam's own rate that it is held to; 0 = all of it
  double bus_rate = 8e9;      // bytes a second of copies, each way
  std::uint32_t experts = 0;  // behind each of a quarter of the units; parameters are shared out
  std::uint32_t active_experts = 0;
  bool has_table = false;  // as in StepBenchModel
  bool has_adapters = false;
  bool streams = false;
};
// With all state in memory a step is short, and its copies and Adam want the same cores and memory.
// Like the drive, both are held well below the machine's rates, so their limits are exact;
// adam-unpaced shows the machine without that.
constexpr Regime kRegimes[] = {
    {.name = "compute-bound", .of_storage_s = 2},
    {.name = "drive-bound", .of_storage_s = 0.1},
    {.name = "adam-bound",
     .of_storage_s = 0,
     .of_adam_s = 0.05,
     .adam_share = 0.25,
     .bus_rate = 3e9},
    {.name = "adam-unpaced", .of_storage_s = 0, .of_adam_s = 0.05},
    {.name = "balanced", .of_storage_s = 1},
    {.name = "experts", .of_storage_s = 2, .experts = 64, .active_experts = 4},
    {.name = "rows", .of_storage_s = 2, .experts = 512, .active_experts = 16, .has_table = true},
    {.name = "lora", .of_storage_s = 2, .has_adapters = true},
    {.name = "streamed", .of_storage_s = 0, .of_adam_s = 0.05, .bus_rate = 1e9, .streams = true}};
constexpr OverlapPolicy kPolicies[] = {OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                       OverlapPolicy::kEager, OverlapPolicy::kSpeculative};

// Reads and writes beside the throttled runs, unthrottled.
class BareDrive {
 public:
  explicit BareDrive(const std::string& path)
      : bench_({.paths = {path},
                .file_bytes = kBareFileBytes,
                .request_bytes_max = 4_MiB,
                .depth_max = 8},
               [](std::span<std::byte> memory, std::span<const int> files) {
                 std::string note;
                 Config::Storage storage;
                 return open_io_queue(storage, {.memory = memory, .files = files}, note);
               }) {}

  double bytes_per_second() {
    const IoMeasurement measured =
        bench_.measure({.pattern = IoPattern::kMixed, .request_bytes = 4_MiB, .depth = 8});
    return static_cast<double>(measured.bytes) / measured.seconds;
  }

 private:
  IoBench bench_;
};

// Holds Adam to a rate as long as it lives.
class AdamPace {
 public:
  explicit AdamPace(double parameters_per_second) {
    CpuOptimizer::set_update_pace(static_cast<std::uint64_t>(parameters_per_second));
  }
  ~AdamPace() { CpuOptimizer::set_update_pace(0); }
  AdamPace(const AdamPace&) = delete;
  AdamPace& operator=(const AdamPace&) = delete;
};

// Storage and computation work for the units that a step uses.
Rates rates_of(const StepRegimeOptions& options, const Regime& regime, const StepBenchModel& model,
               const CpuRates& cpu) {
  Rates rates;
  rates.read_bytes_per_second = rates.write_bytes_per_second =
      static_cast<double>(options.rate_bytes_per_second);
  rates.duplex = Duplex::kHalf;
  rates.latency_s = kLatencyS;
  rates.flush_s = options.flush_s;
  rates.write_cache_bytes = options.write_cache_bytes;
  rates.up_bytes_per_second = rates.down_bytes_per_second = regime.bus_rate;
  rates.adam_parameters_per_second = cpu.adam;
  rates.norm_parameters_per_second = cpu.norm;
  const std::uint64_t used = options.parameters * model.used_units() / model.unit_count();
  const double storage_s = regime.has_adapters ? 4 * static_cast<double>(options.parameters) /
                                                     rates.read_bytes_per_second
                                               : ideal_storage_s(rates, used);
  const double compute_s = regime.of_storage_s * storage_s * (1 - options.memory_share) +
                           regime.of_adam_s * static_cast<double>(options.parameters) / cpu.adam;
  const auto time_of = [](double unit_s) {
    return UnitTime{.forward_s = kForwardShare * unit_s,
                    .backward_s = (1 - kForwardShare) * unit_s};
  };
  rates.units.assign(model.unit_count(), time_of(compute_s / model.used_units()));
  if (!regime.has_adapters) return rates;
  const double adapter_s = compute_s / static_cast<double>(model.units * (kAdapterShare + 1));
  for (std::uint32_t unit = 0; unit < model.unit_count(); ++unit)
    rates.units[unit] = time_of(unit < model.units ? adapter_s : adapter_s * kAdapterShare);
  return rates;
}

// The time of the units that a step uses.
double compute_of(const Rates& rates, const StepBenchModel& model) {
  double compute_s = 0;
  for (std::uint32_t unit = 0; unit < model.used_units(); ++unit)
    compute_s += rates.units[unit].forward_s + rates.units[unit].backward_s;
  return compute_s;
}

StepBenchModel model_of(const StepRegimeOptions& options, const Regime& regime, unsigned threads) {
  const bool in_memory = regime.of_adam_s != 0;
  return {.parameters = options.parameters,
          .units = regime.experts == 0 ? options.units : std::max(1u, options.units / 4),
          .path = options.path,
          .lanes = options.lanes,
          .memory_share = in_memory ? 1 : options.memory_share,
          .threads = threads,
          .window_units = options.window_units,
          .window_holds_all = in_memory,
          .number = 0,
          .commit_every = options.commit_every,
          .flush_s = options.flush_s,
          .write_cache_bytes = options.write_cache_bytes,
          .save_every = options.save_every,
          .experts = regime.experts,
          .active_experts = regime.active_experts,
          .has_table = regime.has_table,
          .has_adapters = regime.has_adapters,
          .streams = regime.streams};
}

// An engine of each wanted policy, and one of the same without commits and checkpoints before it.
void add_benches(const StepRegimeOptions& options, StepBenchModel model, RegimeResult& result) {
  const auto add = [&](OverlapPolicy policy, const StepBenchModel& wanted, bool is_bare) {
    result.policies.push_back({.policy = policy,
                               .is_bare = is_bare,
                               .bench = std::make_unique<StepBench>(wanted, policy, result.rates)});
    ++model.number;
  };
  for (const OverlapPolicy policy : kPolicies) {
    const bool is_wanted =
        options.policies.empty() || std::ranges::count(options.policies, name_of(policy)) != 0;
    if (!is_wanted) continue;
    if (options.has_bare) {
      StepBenchModel without = model;
      without.commit_every = without.save_every = 0;
      add(policy, without, true);
    }
    add(policy, model, false);
  }
}

}  // namespace

Summary summary_of(std::vector<double> values) {
  if (values.empty()) return {};
  const auto [low, high] = std::ranges::minmax(values);
  return {.median = median(values), .low = low, .high = high};
}

const std::vector<std::string>& step_regimes() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const Regime& regime : kRegimes) list.emplace_back(regime.name);
    return list;
  }();
  return names;
}

RegimeResult measure_regime(const StepRegimeOptions& options, const std::string& name) {
  const Regime& regime = *std::ranges::find(kRegimes, name, &Regime::name);
  const std::uint64_t cpu_parameters = std::min<std::uint64_t>(options.parameters, 20'000'000);
  std::vector<double> adam, norm, bare;
  // Half of the cores: the others make the copies that a device makes by itself.
  const bool in_memory = regime.of_adam_s != 0;
  const unsigned threads = std::max(1u, topology().granted_cores / (in_memory ? 2 : 1));
  CpuRates first = measure_cpu_rates(cpu_parameters, threads);
  const AdamPace pace(regime.adam_share * first.adam);
  if (regime.adam_share != 0) first.adam *= regime.adam_share;
  const StepBenchModel model = model_of(options, regime, threads);
  RegimeResult result{.name = name,
                      .rates = rates_of(options, regime, model, first),
                      .used_units = model.used_units()};
  if (regime.streams)
    result.rates.device_adam_parameters_per_second = measure_device_update(cpu_parameters);
  result.compute_s = compute_of(result.rates, model);
  add_benches(options, model, result);
  BareDrive drive(options.path);
  // Turns of whole periods: each checkpoint is begun and ended in the steps that are measured.
  const unsigned period = std::max(1u, options.save_every);
  const unsigned steps_a_round = std::max((kStepsARound + period - 1) / period, 2u) * period;
  for (unsigned done = 0; done < options.steps && !interrupted(); done += steps_a_round) {
    for (PolicyResult& policy : result.policies) {
      if (interrupted()) break;
      bare.push_back(drive.bytes_per_second());
      const CpuRates cpu = measure_cpu_rates(cpu_parameters, threads);
      adam.push_back(cpu.adam);
      norm.push_back(cpu.norm);
      const auto steps =
          policy.bench->run(kWarmSteps, std::min(steps_a_round, options.steps - done));
      policy.steps.insert(policy.steps.end(), steps.begin(), steps.end());
      policy.adam.push_back(policy.bench->cpu_rates().adam);
      policy.norm.push_back(policy.bench->cpu_rates().norm);
    }
  }
  result.adam = summary_of(adam);
  result.bare = summary_of(bare);
  result.rates.adam_parameters_per_second = result.adam.median;
  result.rates.norm_parameters_per_second = summary_of(norm).median;
  std::set<std::string> states;
  for (PolicyResult& policy : result.policies) {
    policy.predicted = policy.bench->bound(result.rates);
    Rates rates = result.rates;
    rates.adam_parameters_per_second = summary_of(policy.adam).median;
    rates.norm_parameters_per_second = summary_of(policy.norm).median;
    policy.bound = policy.bench->bound(rates);
    states.insert(state_sha256(policy.bench->engine()));
  }
  for (PolicyResult& policy : result.policies) {
    // Each engine has the buffers of its policy, so any of them may move the fewest bytes.
    const StepCost least = policy.bench->minimum(result.rates);
    if (result.least.step_s == 0 || least.step_s < result.least.step_s) result.least = least;
    result.frozen_parameters = policy.bench->frozen_parameters();
    policy.late_s = policy.bench->late_s();
    policy.saves = policy.bench->saves();
    policy.bench.reset();
  }
  if (!interrupted()) result.states_equal = states.size() == 1;
  return result;
}

std::vector<CostResult> costs_of(const RegimeResult& regime) {
  std::vector<CostResult> costs;
  for (std::size_t i = 0; i + 1 < regime.policies.size(); ++i) {
    const PolicyResult& bare = regime.policies[i];
    const PolicyResult& with = regime.policies[i + 1];
    const std::size_t pairs = std::min(bare.steps.size(), with.steps.size());
    if (!bare.is_bare || pairs == 0) continue;
    std::vector<double> ratios;
    double bare_s = 0;
    double with_s = 0;
    for (std::size_t step = 0; step < pairs; ++step) {
      bare_s += bare.steps[step].step_s;
      with_s += with.steps[step].step_s;
      ratios.push_back(with.steps[step].step_s / bare.steps[step].step_s);
    }
    std::ranges::sort(ratios);
    costs.push_back({.policy = with.policy,
                     .pairs = pairs,
                     .ratio = {.median = summary_of(ratios).median,
                               .low = ratios[(pairs - 1) / 10],
                               .high = ratios[pairs - 1 - (pairs - 1) / 10]},
                     .mean_ratio = with_s / bare_s,
                     .planned_ratio = with.bound.step_s / bare.bound.step_s});
  }
  return costs;
}

}  // namespace sluice
