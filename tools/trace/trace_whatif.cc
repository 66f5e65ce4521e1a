#include "tools/trace/trace_whatif.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <map>
#include <optional>
#include <ranges>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/bound/bound.h"
#include "engine/bound/planned_step.h"
#include "engine/planner/run_plan.h"
#include "engine/run/engine_trace.h"
#include "tools/cli/option_words.h"
#include "tools/trace/trace_rates.h"
#include "tools/trace/trace_steps.h"

namespace sluice {
namespace {

[[noreturn]] void refuse(const std::string& setting, const std::string& why) {
  throw Error(ErrorCode::kConfig, fmt::format("trace whatif: --set {}: {}", setting, why));
}

// Everything that a setting may change.
struct Scenario {
  Config config;
  Rates rates;
  OverlapPolicy policy{};
  std::optional<std::uint64_t> window_units;
};

double number_in(const std::string& setting, std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value > 0) || value > 1e9)
    refuse(setting, fmt::format("\"{}\" is not a positive number", text));
  return value;
}

std::uint32_t count_in(const std::string& setting, std::string_view text) {
  const double value = number_in(setting, text);
  if (value != std::floor(value))
    refuse(setting, fmt::format("\"{}\" is not a whole number", text));
  return static_cast<std::uint32_t>(value);
}

double factor_in(const std::string& setting, std::string_view text) {
  if (text.empty() || text.back() != 'x') refuse(setting, "a factor such as 2x is wanted");
  return number_in(setting, text.substr(0, text.size() - 1));
}

void require_rate(const std::string& setting, const std::string& key) {
  constexpr const char* kKeys[] = {"nvme", "nvme.read", "nvme.write", "nvme.latency",
                                   "copy", "adam",      "compute"};
  if (std::ranges::find(kKeys, key) == std::end(kKeys))
    refuse(setting,
           fmt::format("there is no such key; there are {}, drives, prefetch_window, lanes, "
                       "memory.host, memory.device and policy",
                       fmt::join(kKeys, ", ")));
}

void apply_rate(const std::string& key, double factor, Rates& rates) {
  const auto scale_units = [&] {
    for (UnitTime& unit : rates.units) {
      unit.forward_s /= factor;
      unit.backward_s /= factor;
    }
  };
  if (key == "nvme" || key == "nvme.read") rates.read_bytes_per_second *= factor;
  if (key == "nvme" || key == "nvme.write") rates.write_bytes_per_second *= factor;
  if (key == "nvme.latency") rates.latency_s *= factor;
  if (key == "copy") rates.up_bytes_per_second *= factor;
  if (key == "copy") rates.down_bytes_per_second *= factor;
  if (key == "adam") rates.adam_parameters_per_second *= factor;
  if (key == "adam") rates.norm_parameters_per_second *= factor;
  if (key == "compute") scale_units();
}

OverlapPolicy policy_in(const std::string& setting, const std::string& text) {
  for (const OverlapPolicy policy : {OverlapPolicy::kEager, OverlapPolicy::kDeferred,
                                     OverlapPolicy::kSpeculative, OverlapPolicy::kSerial}) {
    if (text == name_of(policy)) return policy;
  }
  refuse(setting, "the policies are eager, deferred, speculative and serial");
}

void apply(const std::string& setting, Scenario& scenario) {
  const std::size_t equals = setting.find('=');
  if (equals == std::string::npos) refuse(setting, "KEY=VALUE is wanted");
  const std::string key = setting.substr(0, equals), value = setting.substr(equals + 1);
  const auto count = [&] { return count_in(setting, value); };
  if (key == "drives") return apply_rate("nvme", number_in(setting, value), scenario.rates);
  if (key == "prefetch_window") {
    scenario.window_units = count();
  } else if (key == "lanes") {
    scenario.config.optimizer.lanes = count();
  } else if (key == "memory.host") {
    scenario.config.memory.host_bytes = parse_size(value);
  } else if (key == "memory.device") {
    scenario.config.memory.device_bytes = parse_size(value);
  } else if (key == "policy") {
    scenario.config.optimizer.overlap = scenario.policy = policy_in(setting, value);
  } else {
    require_rate(setting, key);
    if (key == "nvme.latency" && scenario.rates.latency_s == 0)
      refuse(setting,
             "the trace does not show the latency of its drives; it does where parameters and "
             "optimizer state are both read and written, one transfer after another, in blocks of "
             "different sizes");
    apply_rate(key, factor_in(setting, value), scenario.rates);
  }
}

// The policy that "auto" took: updates that end before a step's computation does are early ones.
OverlapPolicy policy_of(const TraceAnalysis& analysis, const Config& config) {
  if (config.optimizer.overlap != OverlapPolicy::kAuto) return config.optimizer.overlap;
  if (may_be_eager(config)) return OverlapPolicy::kEager;
  std::uint64_t early = 0, updates = 0;
  for (const TraceRecord& record : analysis.trace().records) {
    if (record.kind != TraceKind::kAdam) continue;
    // Skipped steps of the same number come before the one that is updated.
    const auto from_last = analysis.steps() | std::views::reverse;
    const auto step = std::ranges::find(from_last, record.step, &StepShare::step);
    if (step == from_last.end()) continue;
    ++updates;
    early += record.end_ns < step->end_ns ? 1 : 0;
  }
  return 2 * early > updates ? OverlapPolicy::kSpeculative : OverlapPolicy::kDeferred;
}

class Replay {
 public:
  Replay(const TraceAnalysis& analysis, const std::string& section)
      : model_(model_of_trace(section)),
        config_(config_of_trace(section)),
        machine_(machine_of_trace(section)) {
    validate(config_);
    require_scheduled_units(analysis.trace().path);
    layout_.emplace(plan_layout(config_, model_, shard_of_trace(section)));
    std::map<std::uint32_t, std::uint32_t> units;  // by use
    for (const TraceRecord& record : analysis.trace().records) {
      if (record.kind == TraceKind::kCompute && record.step == analysis.steps()[1].step)
        units[record.use] = record.unit;
    }
    const std::size_t uses_each = model_.forward_order.size() + model_.backward_order.size();
    micro_batches_ = static_cast<std::uint32_t>(std::max<std::size_t>(1, units.size() / uses_each));
    // Vertically, the first unit is used for every micro-batch before the second one is.
    const bool is_vertical = micro_batches_ > 1 && model_.forward_order.size() > 1 &&
                             model_.forward_order[0] != model_.forward_order[1] &&
                             units[0] == units[1];
    order_ = is_vertical ? MicroBatchOrder::kVertical : MicroBatchOrder::kHorizontal;
  }

  // The policy for a scenario whose config says "auto". While the planned policy is the same, the
  // run keeps its own, which may be another one, for example because of clipping.
  OverlapPolicy policy(const Scenario& scenario, OverlapPolicy recorded) const {
    if (scenario.config.optimizer.overlap != OverlapPolicy::kAuto) return scenario.policy;
    const OverlapPolicy planned = plan_run(scenario.config, model_, *layout_, machine_).policy;
    return planned == plan_run(config_, model_, *layout_, machine_).policy ? recorded : planned;
  }

  const Config& config() const { return config_; }
  const Layout& layout() const { return *layout_; }

  StepCost cost(const Scenario& scenario) const {
    Config config = scenario.config;
    config.optimizer.overlap = scenario.policy;
    Placement placement = plan_run(config, model_, *layout_, machine_).placement;
    const std::vector<std::uint64_t> unit_bytes = window_unit_bytes(*layout_, placement);
    if (scenario.window_units)
      placement.window_bytes =
          *scenario.window_units * align_up(std::ranges::max(unit_bytes), kStorageAlignBytes);
    const PlannedStep step({.model = model_, .micro_batches = micro_batches_, .order = order_},
                           *layout_, placement, config.storage.state.commit_every);
    return bound_step(step.shape(scenario.rates), scenario.policy);
  }

 private:
  // Units that are in no order are announced by each step, which may choose others.
  void require_scheduled_units(const std::string& path) const {
    std::vector<bool> is_scheduled(model_.units.size(), false);
    for (const auto& order : {model_.forward_order, model_.backward_order})
      for (const UnitId unit : order) is_scheduled[index_of(unit)] = true;
    const auto first = std::ranges::find(is_scheduled, false);
    if (first == is_scheduled.end()) return;
    throw Error(
        ErrorCode::kInput,
        fmt::format("trace whatif: no prediction from \"{}\": {} of its {} units, such as "
                    "\"{}\", are announced, so steps use different units, and the model "
                    "of a step has them all alike",
                    path, std::ranges::count(is_scheduled, false), model_.units.size(),
                    model_.units[static_cast<std::size_t>(first - is_scheduled.begin())].name));
  }

  ModelSpec model_;
  Config config_;
  RunMachine machine_;
  std::optional<Layout> layout_;
  std::uint32_t micro_batches_ = 1;
  MicroBatchOrder order_ = MicroBatchOrder::kHorizontal;
};

// Where an application waits for updates between steps, the model of a step leaves that out.
std::string drained_text(const std::vector<StepShare>& steps) {
  std::int64_t drained_ns = 0;
  for (const StepShare& step : steps) drained_ns += step.drained_ns;
  if (drained_ns == 0) return {};
  const auto is_drained = [](const StepShare& step) { return step.drained_ns != 0; };
  return fmt::format(
      "after {} of the {} steps, something waited for the rest of the update, such as an "
      "evaluation or a checkpoint ({:.3f} ms per step), so the next step had no update beside it",
      std::ranges::count_if(steps, is_drained), steps.size(),
      static_cast<double>(drained_ns) * 1e-6 / static_cast<double>(steps.size()));
}

// The limits of the prediction, so that a reader knows them.
std::vector<std::string> left_out_of(const TraceAnalysis& analysis, const Config& config) {
  const TraceFile& trace = analysis.trace();
  const std::vector<StepShare> steps = steady_steps(analysis);
  std::vector<std::string> notes;
  if (const std::string drained = drained_text(steps); !drained.empty()) notes.push_back(drained);
  if (const std::size_t updated = updated_steps(analysis).size(); updated != steps.size())
    notes.push_back(fmt::format("{} of {} steps: skipped ones, and those right after them",
                                steps.size() - updated, steps.size()));
  if (trace.ranks > 1) {
    std::int64_t waits_ns = 0;
    for (const StepShare& step : steps)
      waits_ns += step.by_cause[static_cast<std::size_t>(StallCause::kCollective)];
    notes.push_back(
        fmt::format("rank {} of {} alone, with its share of the state: gathers, reductions and "
                    "waiting for other ranks ({:.3f} ms per step) stay as they were",
                    trace.rank, trace.ranks,
                    static_cast<double>(waits_ns) * 1e-6 / static_cast<double>(steps.size())));
  }
  if (config.activations.home == ActivationHome::kHost ||
      config.activations.home == ActivationHome::kNvme)
    notes.push_back(
        "boundary activations are work for copies and storage, beside an ideal schedule of "
        "everything else: waits for them stay as they were");
  if (!config.storage.state.name.empty())
    notes.push_back("flushes of commits count as taking no time");
  if (trace.lost != 0)
    notes.push_back(fmt::format("{} records are lost: rates and times lack them", trace.lost));
  return notes;
}

struct RateUse {
  Resource resource;
  double Rates::*rate;
  const char* name;
};
constexpr std::array kTracedRates{
    RateUse{Resource::kStorageRead, &Rates::read_bytes_per_second, "reads of storage"},
    RateUse{Resource::kStorageWrite, &Rates::write_bytes_per_second, "writes to storage"},
    RateUse{Resource::kCopyUp, &Rates::up_bytes_per_second, "copies to the device"},
    RateUse{Resource::kCopyDown, &Rates::down_bytes_per_second, "copies to the host"}};

// Without a rate, work takes no time in the model. So work that only the other step has would be
// free.
void require_known_rates(const TraceAnalysis& analysis, const Replay& replay,
                         const Scenario& recorded, const Scenario& changed) {
  constexpr double kAnyRate = 1e9;
  const auto with_rates = [](Scenario scenario) {
    scenario.rates.duplex = Duplex::kFull;
    for (const RateUse& use : kTracedRates) {
      double& rate = scenario.rates.*use.rate;
      if (rate == 0) rate = kAnyRate;
    }
    return scenario;
  };
  const auto is_unknown = [&](const RateUse& use) { return changed.rates.*use.rate == 0; };
  if (std::ranges::none_of(kTracedRates, is_unknown)) return;
  const StepCost before = replay.cost(with_rates(recorded));
  const StepCost after = replay.cost(with_rates(changed));
  for (const RateUse& use : kTracedRates) {
    if (!is_unknown(use) || before.busy(use.resource) != 0 || after.busy(use.resource) == 0)
      continue;
    throw Error(ErrorCode::kInput,
                fmt::format("trace whatif: no prediction from \"{}\": it has no {}, so their rate "
                            "is unknown, and the step with these settings needs them; trace a run "
                            "that has some",
                            analysis.trace().path, use.name));
  }
}

// For a step that takes `replayed_s` in the model.
void require_fitting_model(const TraceAnalysis& analysis, double measured_s, double replayed_s) {
  if (!(measured_s > 0) || !std::isfinite(replayed_s))
    throw Error(ErrorCode::kInput,
                fmt::format("trace whatif: the steps in \"{}\" took no time; it is damaged",
                            analysis.trace().path));
  const double error = replayed_s / measured_s - 1;
  if (std::abs(error) <= kWhatIfErrorMax) return;
  const std::vector<StepShare> steps = updated_steps(analysis);
  const StepMeans means = means_of(steps);
  const std::string drained = drained_text(steps);
  throw Error(
      ErrorCode::kInput,
      fmt::format("trace whatif: no prediction from \"{}\": its mean step took {:.3f} ms (of {}, "
                  "from {:.3f} to {:.3f} ms), and the model says {:.3f} ms of it, an error of "
                  "{:+.1f} %, where at most {:.0f} % is good enough. {}",
                  analysis.trace().path, 1e3 * measured_s, means.count, 1e3 * means.least_s,
                  1e3 * means.most_s, 1e3 * replayed_s, 100 * error, 100 * kWhatIfErrorMax,
                  drained.empty()
                      ? "A machine under other load, or steps that differ much, are "
                        "the usual reasons; trace a longer run on a quiet machine"
                      : "The reason may be that " + drained + "; trace a run without that"));
}

// The part of a step that the model leaves out stays as it was. Where the model takes too long for
// the recorded step, it does so by the same factor for the other one, so no prediction is negative.
double predicted_step_s(double measured_s, double replayed_s, double changed_s) {
  return replayed_s <= measured_s ? changed_s + (measured_s - replayed_s)
                                  : changed_s * measured_s / replayed_s;
}

}  // namespace

WhatIf what_if(const TraceAnalysis& analysis, const std::vector<std::string>& settings) {
  const TraceFile& trace = analysis.trace();
  const auto section = trace.sections.find("engine");
  if (ended_steps(analysis) < 3 || section == trace.sections.end())
    throw Error(
        ErrorCode::kInput,
        fmt::format("\"{}\" has {} steps{}; whatif needs three, and the engine's description",
                    trace.path, ended_steps(analysis),
                    section == trace.sections.end() ? " and says nothing of its engine" : ""));
  const std::vector<StepShare> updated = updated_steps(analysis);
  if (updated.empty())
    throw Error(ErrorCode::kInput,
                fmt::format("\"{}\" has no two steps in a row that were not skipped; whatif "
                            "predicts a step with its update",
                            trace.path));
  const Replay replay(analysis, section->second);
  Scenario scenario{.config = replay.config(),
                    .rates = rates_of(analysis, replay.layout()),
                    .policy = policy_of(analysis, replay.config()),
                    .window_units = {}};
  WhatIf result{.measured_s = means_of(updated).total_s,
                .replayed = replay.cost(scenario),
                .changed = {},
                .predicted_s = 0,
                .policy = scenario.policy,
                .changed_policy = scenario.policy,
                .rates = scenario.rates,
                .left_out = left_out_of(analysis, replay.config())};
  const auto is_budget = [](const std::string& setting) { return setting.starts_with("memory."); };
  if (std::ranges::any_of(settings, is_budget) && lanes_of_trace_are_planned(section->second))
    scenario.config.optimizer.lanes.reset();  // the plan for another budget chooses again
  const Scenario recorded = scenario;
  for (const std::string& setting : settings) apply(setting, scenario);
  with_words({{"Config::optimizer.overlap", "trace whatif: --set policy"}},
             [&] { validate(scenario.config); });  // a run would be refused, too
  // A budget that is too small is refused on any machine.
  result.changed_policy = scenario.policy = replay.policy(scenario, result.policy);
  result.changed = replay.cost(scenario);
  require_known_rates(analysis, replay, recorded, scenario);
  require_fitting_model(analysis, result.measured_s, result.replayed.step_s);
  result.predicted_s =
      predicted_step_s(result.measured_s, result.replayed.step_s, result.changed.step_s);
  return result;
}

std::string text_of(const WhatIf& what_if) {
  std::string text = fmt::format(
      "recorded step {:.3f} ms (mean, {}); the model alone says {:.3f} ms, an error of {:+.1f} %\n"
      "predicted step {:.3f} ms, {:+.1f} %{}\n"
      "busiest: {} for {:.3f} ms per step, before {} for {:.3f} ms\n",
      1e3 * what_if.measured_s, name_of(what_if.policy), 1e3 * what_if.replayed.step_s,
      100 * what_if.error(), 1e3 * what_if.predicted_s,
      100 * (what_if.predicted_s / what_if.measured_s - 1),
      what_if.changed_policy == what_if.policy
          ? ""
          : fmt::format(" ({})", name_of(what_if.changed_policy)),
      name_of(what_if.changed.scarcest()), 1e3 * what_if.changed.busy(what_if.changed.scarcest()),
      name_of(what_if.replayed.scarcest()),
      1e3 * what_if.replayed.busy(what_if.replayed.scarcest()));
  text += fmt::format("{:<26}{:>12}{:>12}\n", "busy, ms per step", "recorded", "predicted");
  for (std::size_t i = 0; i < kResourceCount; ++i) {
    const double before = what_if.replayed.busy_s[i], after = what_if.changed.busy_s[i];
    if (before == 0 && after == 0) continue;
    text += fmt::format("{:<26}{:>12.3f}{:>12.3f}\n", name_of(static_cast<Resource>(i)),
                        1e3 * before, 1e3 * after);
  }
  const auto& traffic = what_if.changed.traffic;
  if (traffic.activation_out_bytes != 0)
    text += fmt::format("boundary activations, bytes per step: {} out, {} back\n",
                        traffic.activation_out_bytes, traffic.activation_in_bytes);
  for (const std::string& note : what_if.left_out) text += "left out: " + note + "\n";
  return text;
}

}  // namespace sluice
