#include "engine/config/setting_change.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <span>
#include <system_error>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace sluice {
namespace {

// A number in the text of a setting.
struct Part {
  std::string_view key;
  std::span<const std::string_view> names = {};  // of the values 0, 1 and so on
  std::string_view name_of_0 = {};
};

constexpr std::array<std::string_view, 5> kShapes{"constant", "linear", "cosine", "one_cycle",
                                                  "range_test"};
constexpr std::array<std::string_view, 2> kCounts{"sluice", "deepspeed"};
constexpr std::array<std::string_view, 2> kWarmups{"linear", "log"};

// As describe() writes them (engine/config/learning_rate.h).
constexpr std::array kSchedule{Part{"optimizer.schedule", kShapes},
                               Part{"optimizer.schedule_count", kCounts},
                               Part{"optimizer.warmup", kWarmups},
                               Part{"optimizer.warmup_start"},
                               Part{.key = "optimizer.schedule_steps", .name_of_0 = "run.steps"},
                               Part{""},
                               Part{"optimizer.one_cycle.first_steps"},
                               Part{"optimizer.one_cycle.second_steps"},
                               Part{"optimizer.one_cycle.first_stairs"},
                               Part{"optimizer.one_cycle.second_stairs"},
                               Part{"optimizer.one_cycle.decay_steps"},
                               Part{"optimizer.one_cycle.decay_rate"},
                               Part{""},
                               Part{"optimizer.range_test.step_size"},
                               Part{"optimizer.range_test.step_rate"},
                               Part{"optimizer.range_test.staircase"}};
constexpr std::array kLossScale{Part{.key = "precision.loss_scale.static", .name_of_0 = "moving"},
                                Part{"precision.loss_scale.initial_power"},
                                Part{"precision.loss_scale.window"},
                                Part{"precision.loss_scale.hysteresis"},
                                Part{"precision.loss_scale.consecutive_hysteresis"},
                                Part{"precision.loss_scale.minimum"}};

std::vector<std::string_view> words_of(std::string_view text) {
  std::vector<std::string_view> words;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

std::string_view said(const Part& part, std::string_view value) {
  if (value == "0" && !part.name_of_0.empty()) return part.name_of_0;
  std::size_t number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  const bool is_known =
      error == std::errc() && end == value.data() + value.size() && number < part.names.size();
  return is_known ? part.names[number] : value;
}

std::span<const Part> parts_of(std::string_view key) {
  if (key == "optimizer.schedule") return kSchedule;
  if (key == "precision.loss_scale") return kLossScale;
  return {};
}

// The tensors, the factor of the learning rate, and the weight decay or -1.
std::string said_group(std::string_view value) {
  std::vector<std::string_view> words = words_of(value);
  if (words.size() < 3) return std::string(value);
  const std::string_view decay = words.back();
  const std::string_view factor = words[words.size() - 2];
  words.resize(words.size() - 2);
  std::string text =
      fmt::format("\"{}\" with learning_rate_factor {}", fmt::join(words, " "), factor);
  if (decay != "-1") text += fmt::format(" and weight_decay {}", decay);
  return text;
}

}  // namespace

std::vector<std::string> setting_change(std::string_view key, std::string_view before,
                                        std::string_view after) {
  if (key.starts_with("optimizer.groups["))
    return {fmt::format("{} was {} and is {}", key, said_group(before), said_group(after))};
  const std::span<const Part> parts = parts_of(key);
  const std::vector<std::string_view> was = words_of(before);
  const std::vector<std::string_view> is = words_of(after);
  std::vector<std::string> changes;
  if (was.size() == parts.size() && is.size() == parts.size()) {
    for (std::size_t i = 0; i < parts.size(); ++i)
      if (was[i] != is[i])
        changes.push_back(fmt::format("{} was {} and is {}", parts[i].key, said(parts[i], was[i]),
                                      said(parts[i], is[i])));
  }
  if (changes.empty()) changes.push_back(fmt::format("{} was {} and is {}", key, before, after));
  return changes;
}

}  // namespace sluice
