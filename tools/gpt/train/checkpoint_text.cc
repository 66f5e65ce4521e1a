// The part of Checkpointing that writes the application's text of a saved state, and compares the
// text of the state that a run continues from.
#include <algorithm>
#include <charconv>
#include <set>
#include <span>
#include <string>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include "engine/config/learning_rate.h"
#include "engine/config/setting_change.h"
#include "io/checksum.h"
#include "tools/gpt/train/checkpointing.h"
#include "tools/gpt/train/model_file.h"
#include "tools/gpt/train/run_settings.h"

namespace sluice {
namespace {

constexpr const char* kKernelChanges = "kernel_changes";
constexpr const char* kSettingChanges = "setting_changes";
// The number of sequences that the run has drawn by then, over all ranks.
constexpr const char* kDraws = "draws";
constexpr const char* kBeginning = "beginning";

// The settings of this run, and those of the saved one that this run may have lost.
std::set<std::string> compared_keys(const std::map<std::string, std::string>& settings,
                                    const nlohmann::json& saved) {
  std::set<std::string> keys;
  for (const auto& [key, value] : settings) keys.insert(key);
  for (const auto& [key, value] : saved.items())
    if (key.starts_with("optimizer.groups[")) keys.insert(key);
  return keys;
}

std::uint64_t number_in(const nlohmann::json& settings, const char* key) {
  const std::string text = settings.value(key, "");
  const bool is_number = !text.empty() && text.size() < 10 &&
                         std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
  return is_number ? std::stoull(text) : 0;
}

// Older texts have the batch, which had never changed by then.
std::uint64_t draws_in(const nlohmann::json& saved, std::uint64_t steps) {
  const auto found = saved.find(kDraws);
  if (found != saved.end() && found->is_number_unsigned()) return found->get<std::uint64_t>();
  const nlohmann::json& settings = saved["settings"];
  return steps * number_in(settings, "batch.sequences") *
         number_in(settings, "batch.micro_batches") * number_in(settings, "ranks");
}

std::string beginning_in(const nlohmann::json& saved) {
  const auto found = saved.find(kBeginning);
  return found != saved.end() && found->is_string() ? found->get<std::string>() : std::string();
}

bool is_same_change(const SettingChange& one, const SettingChange& other) {
  return one.steps == other.steps && one.key == other.key && one.before == other.before &&
         one.after == other.after;
}

bool is_of_train(const nlohmann::json& saved) {
  return saved.is_object() && saved.contains("steps") && saved["steps"].is_number_unsigned() &&
         saved.contains("settings") && saved["settings"].is_object() && saved.contains("text") &&
         (!saved.contains(kBeginning) || saved[kBeginning].is_string()) &&
         std::all_of(saved["settings"].begin(), saved["settings"].end(),
                     [](const nlohmann::json& value) { return value.is_string(); });
}

// With as many digits as tell the two apart, but three at least. 17 tell all numbers apart.
std::pair<std::string, std::string> told_apart(double one, double other) {
  std::string text, other_text;
  for (int digits = 3; text == other_text && digits <= 17; ++digits) {
    text = fmt::format("{:.{}g}", one, digits);
    other_text = fmt::format("{:.{}g}", other, digits);
  }
  return {text, other_text};
}

// For the note on other run.steps: a schedule that ends with the run ends elsewhere now.
std::string longer_schedule(const LearningRateOptions& options, std::uint64_t steps,
                            const std::string& before) {
  LearningRateOptions old = options;
  if (std::from_chars(before.data(), before.data() + before.size(), old.steps).ec != std::errc{})
    return "";
  const double was = learning_rate_at(old, steps);
  const double is = learning_rate_at(options, steps);
  if (was == is) return "";
  const auto [is_text, was_text] = told_apart(is, was);
  return fmt::format(
      ", and so the schedule's end: the next learning rate is {}, not {}; "
      "--set optimizer.schedule_steps={} --accept-config keeps the schedule",
      is_text, was_text, before);
}

}  // namespace

// Runs that begin with the same settings and text have the same bits, so nothing else has to tell
// them apart.
std::string Checkpointing::own_beginning() const {
  std::string all = text_ + gpt2_config_text(config_.model);
  for (const auto& [key, value] : settings_)
    if (key != "run.steps" && key != kProducts && !follows_ranks(key)) all += key + "=" + value;
  return hex_of(checksum128(std::as_bytes(std::span(all))));
}

// An older state of this run knows the first of the run's changes, and no others.
bool Checkpointing::is_own(const std::string& application) const {
  const nlohmann::json saved =
      nlohmann::json::parse(application, nullptr, /*allow_exceptions=*/false);
  if (!saved.is_object() || beginning_in(saved) != beginning_) return false;
  const std::vector<SettingChange> changes = setting_changes_in(saved, kSettingChanges);
  return changes.size() <= setting_changes_.size() &&
         std::equal(changes.begin(), changes.end(), setting_changes_.begin(), is_same_change);
}

// Checks that the run that goes on is the one that was saved. Returns the steps that it has made.
std::uint64_t Checkpointing::check_application(const std::string& where,
                                               const std::string& application, Kernels kernels) {
  const nlohmann::json saved =
      nlohmann::json::parse(application, nullptr, /*allow_exceptions=*/false);
  const auto fail = [&](const std::string& why) {
    throw Error(ErrorCode::kInput, fmt::format("{}: {}", where, why));
  };
  if (!is_of_train(saved))
    fail("field \"application\" comes from another program, not from sluice train");
  std::vector<std::string> changes;
  std::vector<SettingChange> accepted;
  std::optional<std::string> changed_from;
  for (const std::string& key : compared_keys(settings_, saved["settings"])) {
    const auto found = settings_.find(key);
    const std::string value = found == settings_.end() ? "nothing" : found->second;
    const std::optional<std::string> known = value_before(saved["settings"], key);
    if (!known || *known == value) continue;
    const std::string& before = *known;
    if (key == kProducts && kernels == Kernels::kStay && !options_.accepts_kernels)
      fail(fmt::format(
          "its matrix products were computed by {}, and are computed by {} now, which "
          "changes the last bits; choose the same ones (run.matmul, OPENBLAS_CORETYPE), "
          "or go on with --accept-kernels",
          before, value));
    if (key == kProducts) changed_from = before;
    const std::string change =
        fmt::format("{}", fmt::join(setting_change(key, before, value), "; "));
    // More steps, other ranks and another machine are what a run is resumed for.
    const bool is_converted = options_.converts && key == "precision.gradients";
    if (key == "run.steps" || follows_ranks(key) || key == kProducts || is_converted ||
        options_.accepts_config) {
      notes_.push_back(
          fmt::format("checkpoint: {} from here on{}", change,
                      key == "run.steps" ? longer_schedule(config_, saved["steps"], before) : ""));
      if (key != kProducts) accepted.push_back({.key = key, .before = before, .after = value});
    } else {
      changes.push_back(change);
    }
  }
  if (!changes.empty())
    fail(fmt::format("the config has changed: {}; change it back, or go on with --accept-config",
                     fmt::join(changes, "; ")));
  const std::string text = saved["text"].is_string() ? saved["text"].get<std::string>() : "nothing";
  if (text != text_ && !options_.accepts_data)
    fail(
        fmt::format("the text \"{}\" has {}, but the run was made with {}; name that one, or go "
                    "on with --accept-data",
                    config_.data_file, text_, text));
  if (text != text_) {
    notes_.push_back(
        fmt::format("checkpoint: the text had {}, and has {} from here on", text, text_));
    accepted.push_back({.key = "text", .before = text, .after = text_});
  }
  const auto steps = saved["steps"].get<std::uint64_t>();
  first_steps_ = steps;
  first_draws_ = draws_in(saved, steps);
  kernel_changes_ = setting_changes_in(saved, kKernelChanges);
  setting_changes_ = setting_changes_in(saved, kSettingChanges);
  beginning_ = beginning_in(saved);
  for (SettingChange& change : accepted) {
    change.steps = steps;
    setting_changes_.push_back(std::move(change));
  }
  if (changed_from)
    kernel_changes_.push_back(
        {.steps = steps, .before = *changed_from, .after = settings_[kProducts]});
  return steps;
}

std::uint64_t Checkpointing::draws(std::uint64_t steps) const {
  const std::uint64_t in_a_step =
      std::uint64_t{config_.sequences} * config_.micro_batches * rank_count_;
  return first_draws_ + (steps - first_steps_) * in_a_step;
}

std::string Checkpointing::application(std::uint64_t steps) const {
  nlohmann::json document{
      {"steps", steps}, {kDraws, draws(steps)}, {"settings", settings_}, {"text", text_}};
  if (!beginning_.empty()) document[kBeginning] = beginning_;
  add_changes(document, kKernelChanges, kernel_changes_);
  add_changes(document, kSettingChanges, setting_changes_);
  return document.dump();
}

}  // namespace sluice
