// The bench measures steps under every overlap policy, in several regimes. The regimes show how the
// policies differ. In most regimes, a single resource limits the step: computation, the drive, Adam
// at a fixed rate, or Adam at full speed. In the regime "balanced", computation and the drive limit
// the step equally. In the regimes "experts" and "rows", a step announces and uses only a part of
// the units. In the regime "lora", most units are frozen. The policies take turns, and each turn
// has a few steps. A disturbance of a shared machine therefore affects all policies.
//
// Thread rule: one thread at a time.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tools/bench/step_bench.h"

namespace sluice {

struct StepRegimeOptions {
  std::vector<std::string> policies;  // empty = all
  std::uint64_t parameters = 0;
  std::uint32_t units = 0;
  unsigned steps = 0;  // measured steps of each policy
  std::string path;
  std::uint64_t rate_bytes_per_second = 0;  // of the throttled drive
  std::optional<std::uint32_t> lanes;       // empty = a tenth of the blocks
  std::uint32_t window_units = 3;           // the units that fit the device window
  double memory_share = 0;                  // the share of the state in host memory
  std::uint32_t commit_every = 0;           // as in StepBenchModel
  double flush_s = 5e-3;
  std::uint64_t write_cache_bytes = 0;
  std::uint32_t save_every = 0;
  // If the value is true, each policy is also measured without commits and checkpoints. The bench
  // alternates between the two kinds of measurements.
  bool has_bare = false;
};

struct Summary {
  double median = 0;
  double low = 0;
  double high = 0;
};

Summary summary_of(std::vector<double> values);

struct PolicyResult {
  OverlapPolicy policy{};
  bool is_bare = false;              // true: the run has no commits and no checkpoints
  std::unique_ptr<StepBench> bench;  // null once all steps are measured
  double late_s = 0;
  SaveCosts saves{};
  std::vector<MeasuredStep> steps{};
  std::vector<double> adam{}, norm{};  // parameters per second during the steps of each turn
  StepCost bound{};                    // at the rates `adam` and `norm`
  StepCost predicted{};                // at the rates measured between the runs

  Summary over(const auto& value) const {
    std::vector<double> values;
    for (const MeasuredStep& step : steps) values.push_back(value(step));
    return summary_of(values);
  }
  Summary step_s() const {
    return over([](const MeasuredStep& step) { return step.step_s; });
  }
};

struct RegimeResult {
  std::string name;
  Rates rates;
  std::uint32_t used_units = 0;  // the units that each step uses
  std::uint64_t frozen_parameters = 0;
  double compute_s = 0;
  std::vector<PolicyResult> policies{};
  StepCost least{};
  Summary adam{};  // parameters per second, measured between the runs
  Summary bare{};  // bytes per second of the unthrottled drive, reads plus writes
  // Whether all policies have produced the same state. After an interrupt, the value is missing,
  // because the policies have made different numbers of steps.
  std::optional<bool> states_equal = std::nullopt;
};

// The cost of commits and checkpoints. The comparison forms pairs of steps. One step of a pair has
// commits and checkpoints, and the other step has neither.
struct CostResult {
  OverlapPolicy policy{};
  std::size_t pairs = 0;
  Summary ratio{};  // the median and the 10th and 90th percentiles over all pairs
  // The total time of the steps that have commits and checkpoints, divided by the total time of the
  // other steps. The median does not show the cost of checkpoints, because few steps begin a
  // checkpoint.
  double mean_ratio = 0;
  double planned_ratio = 0;
};
std::vector<CostResult> costs_of(const RegimeResult& regime);

// The names of all regimes: compute-bound, drive-bound, adam-bound, adam-unpaced, balanced,
// experts, rows and lora.
const std::vector<std::string>& step_regimes();

// Requires: `regime` is one of step_regimes().
// If interrupted() (tools/cli/interrupt.h) returns true, the call ends early. The result then has
// the steps that were measured before the interrupt.
// Fails with the errors of Engine.
RegimeResult measure_regime(const StepRegimeOptions& options, const std::string& regime);

}  // namespace sluice
