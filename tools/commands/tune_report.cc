#include "tools/commands/tune_report.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "tools/cli/json_text.h"
#include "tools/tune/tune_axes.h"

namespace sluice {
namespace {

using nlohmann::ordered_json;

std::string seconds_text(double seconds) {
  return fmt::format("{:.4g} s", seconds);
}

bool has_run(const TuneOutcome& outcome, std::size_t index) {
  return index < outcome.contenders.size() && !outcome.contenders[index].round_s.empty() &&
         outcome.contenders[index].failure.empty();
}

std::string row(const TuneOutcome& outcome, std::size_t index) {
  const TunePrediction& prediction = outcome.candidate(index).prediction;
  const std::string name = index == 0 ? "given" : std::to_string(index);
  if (!prediction.obstacle.empty())
    return fmt::format("{:<7}does not fit: {}\n", name,
                       prediction.obstacle.substr(0, prediction.obstacle.find('\n')));
  std::string line = fmt::format("{:<7}{:>12}", name, seconds_text(prediction.step_s));
  if (has_run(outcome, index)) {
    const Contender& contender = outcome.contenders[index];
    line += fmt::format(
        "{:>12}  {:<20}{:>7}", seconds_text(contender.median_s()),
        fmt::format("[{:.4g}, {:.4g}]", contender.least_s(), contender.most_s()),
        has_run(outcome, 0) ? fmt::format("{:.3f}x", gain_of(outcome.contenders, index)) : "-");
  } else if (index < outcome.contenders.size() && !outcome.contenders[index].failure.empty()) {
    const std::string& failure = outcome.contenders[index].failure;
    return line + "  failed: " + failure.substr(0, failure.find('\n')) + "\n";
  }
  return line + "  " + prediction.binds + "\n";
}

std::string calibration_line(const TuneOutcome& outcome) {
  const MachineCalibration& machine = outcome.machine;
  Rates rates;
  machine.set_storage_rates_for(4 << 20, 32, rates);
  return fmt::format(
      "calibration {}: storage reads {:.2f} and writes {:.2f} GB/s, Adam {:.2f} Gparam/s\n",
      outcome.was_cached ? fmt::format("of {:.1f} days ago", age_days(machine))
                         : fmt::format("measured in {:.0f} s", machine.took_s),
      rates.read_bytes_per_second * 1e-9, rates.write_bytes_per_second * 1e-9,
      machine.adam_parameters_per_second * 1e-9);
}

ordered_json json_of(const TuneOutcome& outcome, std::size_t index) {
  const TuneCandidate& candidate = outcome.candidate(index);
  ordered_json settings = ordered_json::object();
  for (const auto& [key, value] : candidate.settings) settings[key] = ordered_json::parse(value);
  ordered_json root = {{"settings", settings},
                       {"predicted_s", nullptr},
                       {"binds", nullptr},
                       {"measured_s", nullptr},
                       {"rounds_s", ordered_json::array()},
                       {"gain", nullptr},
                       {"obstacle", nullptr}};
  if (candidate.prediction.obstacle.empty()) {
    root["predicted_s"] = candidate.prediction.step_s;
    root["binds"] = candidate.prediction.binds;
  } else {
    root["obstacle"] = candidate.prediction.obstacle;
  }
  if (index >= outcome.contenders.size()) return root;
  const Contender& contender = outcome.contenders[index];
  root["rounds_s"] = contender.round_s;
  if (!contender.failure.empty()) root["obstacle"] = contender.failure;
  if (!has_run(outcome, index)) return root;
  root["measured_s"] = contender.median_s();
  if (has_run(outcome, 0)) root["gain"] = gain_of(outcome.contenders, index);
  return root;
}

}  // namespace

std::string settings_text(const TuneSettings& settings) {
  std::vector<std::string> words;
  for (const auto& [key, text] : settings) {
    const auto value = ordered_json::parse(text);
    words.push_back(value.is_null()     ? key + "=(chosen by Sluice)"
                    : value.is_string() ? key + "=" + value.get<std::string>()
                                        : key + "=" + text);
  }
  return fmt::format("{}", fmt::join(words, " "));
}

std::string tune_verdict(const TuneOutcome& outcome) {
  const TuneCandidate& given = outcome.search.given;
  if (outcome.contenders.empty()) {
    if (outcome.search.best.empty())
      return fmt::format("the given config stays: {} predicted, and the model knows none quicker",
                         seconds_text(given.prediction.step_s));
    const double best_s = outcome.search.best.front().prediction.step_s;
    if (!given.prediction.obstacle.empty())
      return fmt::format("does not fit as given: {} predicted with other settings",
                         seconds_text(best_s));
    return fmt::format("predicted: {} per step instead of {}, a gain of {:.2f}x",
                       seconds_text(best_s), seconds_text(given.prediction.step_s),
                       given.prediction.step_s / best_s);
  }
  const double measured_s = outcome.contenders[outcome.winner].median_s();
  if (outcome.winner == 0)
    return fmt::format("the given config stays: {} per step, and {}", seconds_text(measured_s),
                       outcome.search.best.empty() ? "the model knows none quicker"
                                                   : "no candidate is clearly quicker");
  if (!has_run(outcome, 0))
    return fmt::format("does not fit as given: {} per step with other settings",
                       seconds_text(measured_s));
  return fmt::format("tuned: {} per step instead of {}, a gain of {:.2f}x",
                     seconds_text(measured_s), seconds_text(outcome.contenders[0].median_s()),
                     gain_of(outcome.contenders, outcome.winner));
}

std::string tune_table(const TuneOutcome& outcome) {
  std::string text = calibration_line(outcome);
  text += outcome.contenders.empty()
              ? fmt::format("{} candidates by the model, none run\n", outcome.search.predictions)
              : fmt::format("{} candidates by the model; {} rounds of {} steps each\n",
                            outcome.search.predictions, outcome.plan.rounds, outcome.plan.steps);
  text += fmt::format("{:<7}{:>12}", "config", "predicted");
  text += outcome.contenders.empty()
              ? "  bound by\n"
              : fmt::format("{:>12}  {:<20}{:>7}  bound by\n", "measured", "[least, most]", "gain");
  for (std::size_t i = 0; i <= outcome.search.best.size(); ++i) text += row(outcome, i);
  for (std::size_t i = 1; i <= outcome.search.best.size(); ++i) {
    const TuneSettings& settings = outcome.candidate(i).settings;
    text += fmt::format(
        "{}: {}{}\n", i, settings_text(settings),
        divides_batch(settings) ? " (the same sequences per step, other rounding)" : "");
  }
  return text;
}

std::string tune_json(const TuneOutcome& outcome) {
  ordered_json root = {{"winner", nullptr},
                       {"predictions", outcome.search.predictions},
                       {"rounds", outcome.contenders.empty() ? 0 : outcome.plan.rounds},
                       {"steps", outcome.contenders.empty() ? 0 : outcome.plan.steps},
                       {"seconds", outcome.seconds},
                       {"calibration",
                        {{"hardware", outcome.machine.hardware},
                         {"made_s", outcome.machine.made_s},
                         {"took_s", outcome.machine.took_s},
                         {"was_cached", outcome.was_cached},
                         {"age_days", age_days(outcome.machine)}}},
                       {"given", json_of(outcome, 0)},
                       {"finalists", ordered_json::array()}};
  if (!outcome.contenders.empty()) root["winner"] = outcome.winner;
  for (std::size_t i = 1; i <= outcome.search.best.size(); ++i)
    root["finalists"].push_back(json_of(outcome, i));
  return json_text(root) + "\n";
}

}  // namespace sluice
