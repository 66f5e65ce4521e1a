#include "engine/plan/parameter_groups.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/error.h>
#include "base/moment_rounding.h"

namespace sluice {
namespace {

bool names(const Config::Optimizer::Group& group, std::string_view tensor) {
  return std::ranges::any_of(group.tensors, [tensor](const std::string& pattern) {
    return matches_pattern(pattern, tensor);
  });
}

std::vector<std::string> tensor_names(const ModelSpec& model) {
  std::vector<std::string> all;
  for (const UnitSpec& unit : model.units) {
    for (const TensorSpec& tensor : unit.tensors) all.push_back(tensor.name);
  }
  return all;
}

void require_match(const std::string& pattern, std::size_t group,
                   const std::vector<std::string>& tensors) {
  constexpr std::size_t kShown = 8;
  if (std::ranges::any_of(tensors,
                          [&](const std::string& name) { return matches_pattern(pattern, name); }))
    return;
  const std::vector<std::string> shown(
      tensors.begin(),
      tensors.begin() + static_cast<std::ptrdiff_t>(std::min(kShown, tensors.size())));
  throw Error(
      ErrorCode::kConfig,
      fmt::format(
          "optimizer.groups[{}]: \"{}\" matches no tensor; the model has {}{}", group, pattern,
          fmt::join(shown, ", "),
          tensors.size() > kShown ? fmt::format(" and {} more", tensors.size() - kShown) : ""));
}

}  // namespace

ParameterGroups::ParameterGroups(const Config::Optimizer& optimizer, const ModelSpec& model)
    : options_(optimizer.options()), rounding_seed_(optimizer.rounding_seed) {
  const std::vector<std::string> tensors = tensor_names(model);
  for (std::size_t i = 0; i < optimizer.groups.size(); ++i) {
    for (const std::string& pattern : optimizer.groups[i].tensors)
      require_match(pattern, i, tensors);
  }
  std::vector<bool> has_tensors(optimizer.groups.size(), false);
  for (const UnitSpec& unit : model.units) {
    for (const TensorSpec& tensor : unit.tensors) {
      Set set{.weight_decay =
                  tensor.weight_decay == WeightDecay::kApply ? options_.adam.weight_decay : 0};
      const auto group = std::ranges::find_if(
          optimizer.groups, [&](const auto& candidate) { return names(candidate, tensor.name); });
      if (group != optimizer.groups.end()) {
        set.group = static_cast<std::size_t>(group - optimizer.groups.begin());
        has_tensors[*set.group] = true;
        set.learning_rate_factor = group->learning_rate_factor;
        set.weight_decay = group->weight_decay.value_or(set.weight_decay);
      }
      set_of_tensors_.push_back(index_of(set));
    }
  }
  const auto empty = std::ranges::find(has_tensors, false);
  if (empty != has_tensors.end())
    throw Error(ErrorCode::kConfig,
                fmt::format("optimizer.groups[{}] has no effect: each of its tensors belongs to a "
                            "group before it, and the first one counts",
                            empty - has_tensors.begin()));
}

std::uint32_t ParameterGroups::index_of(const Set& set) {
  const auto known = std::ranges::find(sets_, set);
  if (known != sets_.end()) return static_cast<std::uint32_t>(known - sets_.begin());
  sets_.push_back(set);
  return static_cast<std::uint32_t>(sets_.size() - 1);
}

StepCoefficients ParameterGroups::coefficients(double learning_rate,
                                               std::span<const double> group_learning_rates,
                                               UpdateNumbers numbers, float gradient_scale) const {
  StepCoefficients coefficients{.of_set = {},
                                .rounding_key = rounding_key_of_step(rounding_seed_, numbers.step)};
  for (const Set& set : sets_) {
    OptimizerOptions options = options_;
    options.adam.weight_decay = set.weight_decay;
    const double rate = set.group && !group_learning_rates.empty()
                            ? group_learning_rates[*set.group]
                            : learning_rate * set.learning_rate_factor;
    coefficients.of_set.push_back(coefficients_of(options, rate, numbers.of_unit, gradient_scale));
  }
  return coefficients;
}

bool matches_pattern(std::string_view pattern, std::string_view name) {
  // The position of the last '*', and where in `name` the text after it was last tried.
  std::size_t star = std::string_view::npos, retry = 0;
  std::size_t at = 0, i = 0;
  while (i < name.size()) {
    if (at < pattern.size() && pattern[at] == '*') {
      star = at++;
      retry = i;
    } else if (at < pattern.size() && (pattern[at] == '?' || pattern[at] == name[i])) {
      ++at;
      ++i;
    } else if (star != std::string_view::npos) {
      at = star + 1;
      i = ++retry;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', at) == std::string_view::npos;
}

}  // namespace sluice
