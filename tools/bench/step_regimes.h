// Steps of every overlap policy under the regimes that tell them apart: limited by computation, by
// the drive, by Adam (held to a rate, or at its own), or by computation and the drive alike.
// Policies take turns, a few steps each, so that a shared machine's disturbances meet all of them.
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
  unsigned steps = 0;  // measured of each policy
  std::string path;
  std::uint64_t rate_bytes_per_second = 0;  // of the throttled drive
  std::optional<std::uint32_t> lanes;       // empty = a tenth of the blocks
  std::uint32_t window_units = 3;           // that the device window has room for
  double memory_share = 0;                  // of the state in host memory
  std::uint32_t commit_every = 0;           // as StepBenchModel's
  double flush_s = 5e-3;
};

struct Summary {
  double median = 0;
  double low = 0;
  double high = 0;
};

Summary summary_of(std::vector<double> values);

struct PolicyResult {
  OverlapPolicy policy{};
  std::unique_ptr<StepBench> bench;  // gone once all is measured
  double late_s = 0;
  std::vector<MeasuredStep> steps{};
  std::vector<double> adam{}, norm{};  // parameters a second in the steps, by turn
  StepCost bound{};                    // at those rates
  StepCost predicted{};                // at what was measured beside the steps

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
  std::vector<PolicyResult> policies{};
  StepCost least{};
  Summary adam{};  // parameters a second beside the runs
  Summary bare{};  // bytes a second of the drive itself, reading and writing
  // Nothing after an interrupt: the policies have then made different numbers of steps.
  std::optional<bool> states_equal = std::nullopt;
};

// compute-bound, drive-bound, adam-bound, adam-unpaced, balanced.
const std::vector<std::string>& step_regimes();

// Requires: `regime` is one of them.
// Fails with: as Engine. Ends early, with the steps so far, once interrupted()
// (tools/cli/interrupt.h).
RegimeResult measure_regime(const StepRegimeOptions& options, const std::string& regime);

}  // namespace sluice
