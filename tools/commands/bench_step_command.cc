#include "tools/commands/bench_step_command.h"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/topology.h"
#include "tools/bench/step_regimes.h"
#include "tools/cli/exit_codes.h"
#include "tools/cli/interrupt.h"
#include "tools/cli/json_text.h"
#include "tools/cli/option_words.h"
#include "tools/cli/output_file.h"
#include "tools/cli/print.h"
#include "tools/cli/terminal.h"
#include "tools/commands/bench_plots.h"
#include "tools/trace/trace_session.h"

namespace sluice {
namespace {

constexpr std::uint64_t kTraceRingBytes = 8_MiB;

[[noreturn]] void refuse_step_bench(const std::string& message) {
  throw Error(ErrorCode::kConfig, "bench step: " + message);
}

// The median of all steps, in percent of what they need.
double percent_of_wanted(const PolicyResult& policy, std::uint64_t StepReport::*moved,
                         std::uint64_t MeasuredStep::*wanted) {
  return 100 * policy
                   .over([&](const MeasuredStep& step) {
                     return static_cast<double>(step.report.*moved) /
                            static_cast<double>(std::max<std::uint64_t>(step.*wanted, 1));
                   })
                   .median;
}
double percent_read(const PolicyResult& policy) {
  return percent_of_wanted(policy, &StepReport::nvme_read_bytes, &MeasuredStep::wanted_read_bytes);
}
double percent_written(const PolicyResult& policy) {
  return percent_of_wanted(policy, &StepReport::nvme_write_bytes,
                           &MeasuredStep::wanted_write_bytes);
}

// Against serial with the same commits and checkpoints, by medians; 0 when it was not measured.
double speedup(const RegimeResult& regime, const PolicyResult& policy) {
  for (const PolicyResult& other : regime.policies) {
    if (other.policy == OverlapPolicy::kSerial && other.is_bare == policy.is_bare)
      return other.step_s().median / policy.step_s().median;
  }
  return 0;
}

double bytes_a_parameter(const BenchStepOptions& options, double bytes) {
  return bytes / static_cast<double>(options.parameters);
}

double median_read(const PolicyResult& policy) {
  return policy
      .over(
          [](const MeasuredStep& step) { return static_cast<double>(step.report.nvme_read_bytes); })
      .median;
}
double median_written(const PolicyResult& policy) {
  return policy
      .over([](const MeasuredStep& step) {
        return static_cast<double>(step.report.nvme_write_bytes);
      })
      .median;
}

// "deferred, bare" is without commits and checkpoints.
std::string words_of(const PolicyResult& policy) {
  return std::string(name_of(policy.policy)) + (policy.is_bare ? ", bare" : "");
}

void print_traffic(const BenchStepOptions& options, const RegimeResult& regime) {
  say("{:<12}{:>8}  {:<9}{:>11}{:>9}{:>10}\n", "policy", "read B", "(ideal)", "written B",
      "stall s", "Gparam/s");
  for (const PolicyResult& policy : regime.policies) {
    if (policy.steps.empty()) continue;
    const Summary stall = policy.over(
        [](const MeasuredStep& s) { return static_cast<double>(s.report.stall_ns) * 1e-9; });
    const double ideal_read = static_cast<double>(policy.bound.traffic.nvme_read_bytes);
    say("{:<12}{:>8.2f}  {:<9}{:>11.2f}{:>9.3f}{:>10.2f}\n", words_of(policy),
        bytes_a_parameter(options, median_read(policy)),
        fmt::format("({:.2f})", bytes_a_parameter(options, ideal_read)),
        bytes_a_parameter(options, median_written(policy)), stall.median,
        summary_of(policy.adam).median * 1e-9);
  }
  for (const PolicyResult& policy : regime.policies) {
    if (policy.steps.empty() || regime.frozen_parameters == 0) continue;
    const auto frozen = static_cast<double>(regime.frozen_parameters);
    say("{}: steps read {:.3f} and write {:.3f} bytes for each frozen parameter, {:.1f} % of what "
        "the plan reads\n",
        words_of(policy), median_read(policy) / frozen, median_written(policy) / frozen,
        percent_read(policy));
  }
  if (regime.used_units == regime.rates.units.size()) return;
  for (const PolicyResult& policy : regime.policies) {
    if (!policy.steps.empty())
      say("{}: steps use {} of {} units, and move {:.1f} % (read) and {:.1f} % (written) of their "
          "bytes\n",
          words_of(policy), regime.used_units, regime.rates.units.size(), percent_read(policy),
          percent_written(policy));
  }
}

void print_costs(const RegimeResult& regime) {
  for (const CostResult& cost : costs_of(regime))
    say("{}: {:.3f} x bare [{:.3f}, {:.3f}] over {} pairs, all steps {:.3f} x; T_bound {:.3f} x\n",
        name_of(cost.policy), cost.ratio.median, cost.ratio.low, cost.ratio.high, cost.pairs,
        cost.mean_ratio, cost.planned_ratio);
  for (const PolicyResult& policy : regime.policies) {
    if (policy.saves.count == 0) continue;
    const double count = policy.saves.count;
    say("{}: {} checkpoints of {:.3f} s each; training was blocked for {:.3f} s, updates waited "
        "{:.3f} s\n",
        name_of(policy.policy), policy.saves.count, policy.saves.duration_s / count,
        policy.saves.blocked_s / count, policy.saves.update_wait_s / count);
  }
}

void print(const BenchStepOptions& options, const RegimeResult& regime) {
  say("\n{}: computation {:.3f} s, T_min {:.3f} s ({})\n", regime.name, regime.compute_s,
      regime.least.step_s, name_of(regime.least.scarcest()));
  say("{:<12}{:>8}  {:<16}{:>9}{:>8}{:>8}{:>8}{:>9}\n", "policy", "step s", "[min, max]", "T_bound",
      "% of it", "% T_min", "plan s", "x serial");
  for (const PolicyResult& policy : regime.policies) {
    if (policy.steps.empty()) {
      say("{:<12}  not measured (interrupted)\n", words_of(policy));
      continue;
    }
    const Summary step = policy.step_s();
    const double times_serial = speedup(regime, policy);
    say("{:<12}{:>8.3f}  {:<16}{:>9.3f}{:>8.1f}{:>8.1f}{:>8.3f}{:>9}\n", words_of(policy),
        step.median, fmt::format("[{:.3f}, {:.3f}]", step.low, step.high), policy.bound.step_s,
        100 * policy.bound.step_s / step.median, 100 * regime.least.step_s / step.median,
        policy.predicted.step_s, times_serial == 0 ? "-" : fmt::format("{:.2f}", times_serial));
  }
  print_traffic(options, regime);
  print_costs(regime);
  say("beside it: drive without throttle {:.2f} GB/s [{:.2f}, {:.2f}], Adam {:.2f} Gparam/s "
      "[{:.2f}, {:.2f}]; states {}\n",
      regime.bare.median * 1e-9, regime.bare.low * 1e-9, regime.bare.high * 1e-9,
      regime.adam.median * 1e-9, regime.adam.low * 1e-9, regime.adam.high * 1e-9,
      !regime.states_equal   ? "not compared (interrupted)"
      : *regime.states_equal ? "equal"
                             : "DIFFER");
  flush_said();
}

nlohmann::ordered_json json_of(const Summary& summary) {
  return {{"median", summary.median}, {"min", summary.low}, {"max", summary.high}};
}

nlohmann::ordered_json json_of(const RegimeResult& regime) {
  nlohmann::ordered_json root = {
      {"regime", regime.name},
      {"compute_s", regime.compute_s},
      {"used_units", regime.used_units},
      {"frozen_parameters", regime.frozen_parameters},
      {"t_min_s", regime.least.step_s},
      {"scarcest", name_of(regime.least.scarcest())},
      {"adam_parameters_per_s", json_of(regime.adam)},
      {"bare_bytes_per_second", json_of(regime.bare)},
      {"states_equal", regime.states_equal ? nlohmann::ordered_json(*regime.states_equal)
                                           : nlohmann::ordered_json(nullptr)},
      {"policies", nlohmann::ordered_json::array()},
      {"costs", nlohmann::ordered_json::array()}};
  for (const PolicyResult& policy : regime.policies) {
    const Summary step = policy.step_s();
    std::vector<double> times;
    for (const MeasuredStep& s : policy.steps) times.push_back(s.step_s);
    root["policies"].push_back(
        {{"policy", name_of(policy.policy)},
         {"bare", policy.is_bare},
         {"step_s", json_of(step)},
         {"steps_s", times},
         {"t_bound_s", policy.bound.step_s},
         {"percent_of_t_bound", 100 * policy.bound.step_s / step.median},
         {"percent_of_t_min", 100 * regime.least.step_s / step.median},
         {"predicted_s", policy.predicted.step_s},
         {"adam_in_steps_parameters_per_s", json_of(summary_of(policy.adam))},
         {"times_serial", speedup(regime, policy)},
         {"nvme_read_bytes", median_read(policy)},
         {"nvme_write_bytes", median_written(policy)},
         {"percent_of_wanted_read", percent_read(policy)},
         {"percent_of_wanted_written", percent_written(policy)},
         {"ideal_read_bytes", policy.bound.traffic.nvme_read_bytes},
         {"ideal_write_bytes", policy.bound.traffic.nvme_write_bytes},
         {"late_s", policy.late_s},
         {"saves", policy.saves.count},
         {"save_seconds", policy.saves.duration_s},
         {"blocked_seconds", policy.saves.blocked_s},
         {"update_wait_seconds", policy.saves.update_wait_s}});
  }
  for (const CostResult& cost : costs_of(regime))
    root["costs"].push_back({{"policy", name_of(cost.policy)},
                             {"pairs", cost.pairs},
                             {"times_bare", cost.ratio.median},
                             {"times_bare_p10", cost.ratio.low},
                             {"times_bare_p90", cost.ratio.high},
                             {"times_bare_mean", cost.mean_ratio},
                             {"t_bound_times_bare", cost.planned_ratio}});
  return root;
}

void write_json(OutputFile& output, const BenchStepOptions& options,
                const std::vector<RegimeResult>& regimes) {
  nlohmann::ordered_json root = {{"processor", topology().processor},
                                 {"granted_cores", topology().granted_cores},
                                 {"parameters", options.parameters},
                                 {"units", options.units},
                                 {"rate_bytes_per_second", parse_size(options.rate)},
                                 {"memory_share", options.memory_share},
                                 {"commit_every", options.commit_every},
                                 {"flush_ms", options.flush_ms},
                                 {"write_cache_bytes", parse_size(options.write_cache)},
                                 {"save_every", options.save_every},
                                 {"interrupted", interrupted()},
                                 {"regimes", nlohmann::ordered_json::array()}};
  for (const RegimeResult& regime : regimes) root["regimes"].push_back(json_of(regime));
  write_whole(output, json_text(root) + "\n");
}

void check(const BenchStepOptions& options) {
  if (!options.trace_file.empty() && (options.regimes.size() != 1 || options.policies.size() != 1))
    refuse_step_bench("--trace is of one engine: give one --regime and one --policy");
  if (!options.trace_file.empty() && options.has_bare)
    refuse_step_bench("--trace is of one engine: leave --with-bare out");
  if (options.parameters < options.units || options.units < 1)
    refuse_step_bench(fmt::format("{} parameters in {} units", options.parameters, options.units));
  if (options.save_every != 0 && options.steps % options.save_every != 0)
    refuse_step_bench(
        fmt::format("--steps {} is no multiple of --save-every {}; a checkpoint's cost "
                    "is that of whole periods",
                    options.steps, options.save_every));
  if (parse_size(options.rate) < 1'000'000)
    refuse_step_bench(fmt::format("--rate {} is below 1MB per second", options.rate));
}

int bench_step(const BenchStepOptions& options) {
  check(options);
  OutputFiles outputs;
  OutputFile& json = outputs.add("--json", options.json_file);
  OutputFile& plot = outputs.add("--plot", options.plot_file);
  OutputFile& trace_file = outputs.add("--trace", options.trace_file, OutputMode::kPrivate);
  outputs.check();
  catch_interrupts();
  defer_interrupts(
      "sluice: ending after this turn; a second signal ends at once, without its figures\n");
  say("{} parameters (bf16) in {} units; drive throttled to {} per second, half duplex\n",
      options.parameters, options.units, options.rate);
  flush_said();
  std::vector<RegimeResult> results;
  TraceSession trace(trace_file, kTraceRingBytes);
  trace_file.accept();
  const StepRegimeOptions regime_options{.policies = options.policies,
                                         .parameters = options.parameters,
                                         .units = options.units,
                                         .steps = options.steps,
                                         .path = options.path,
                                         .rate_bytes_per_second = parse_size(options.rate),
                                         .lanes = options.lanes,
                                         .window_units = options.window_units,
                                         .memory_share = options.memory_share,
                                         .commit_every = options.commit_every,
                                         .flush_s = options.flush_ms * 1e-3,
                                         .write_cache_bytes = parse_size(options.write_cache),
                                         .save_every = options.save_every,
                                         .has_bare = options.has_bare};
  for (const std::string& regime : options.regimes.empty() ? step_regimes() : options.regimes) {
    if (interrupted()) break;
    {
      const Progress progress(regime + ": all policies take turns");
      results.push_back(measure_regime(regime_options, regime));
    }
    print(options, results.back());
  }
  const TraceEnd end = trace.finish(/*is_quiet=*/false);
  say("{}", end.summary);
  if (json.is_wanted()) write_json(json, options, results);
  if (plot.is_wanted() && !results.empty()) write_whole(plot, step_plot(results));
  if (end.failure) throw Error(*end.failure);
  return interrupted() ? kExitInterrupted : kExitOk;
}

}  // namespace

int run_bench_step(const BenchStepOptions& options) {
  return with_words({{"storage.paths", "--path"}, {"optimizer.lanes", "--lanes"}},
                    [&] { return bench_step(options); });
}

}  // namespace sluice
