#include "engine/step/step_terms.h"

#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <sluice/error.h>
#include "engine/config/micro_batch_limit.h"

namespace sluice {

void StepTerms::check(const char* call, const StepOptions& options) const {
  const auto fail = [call](const std::string& message) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: {}", call, message));
  };
  const auto check_rate = [&](const std::string& name, double rate) {
    if (!(rate >= 0) || !std::isfinite(rate))
      fail(fmt::format("{} is {}; it must be finite and not negative", name, rate));
    if (rate > std::numeric_limits<float>::max())
      fail(
          fmt::format("{} is {}, but updates compute with fp32, which ends at 3.4e38", name, rate));
  };
  check_rate("learning_rate", options.learning_rate);
  if (options.order > MicroBatchOrder::kVertical)
    fail(fmt::format("MicroBatchOrder {} does not exist", static_cast<int>(options.order)));
  if (options.micro_batches == 0) fail("micro_batches is 0; a step has at least one");
  if (options.micro_batches > kMicroBatchesMax)
    fail(fmt::format("micro_batches is {}; a step has at most {}", options.micro_batches,
                     kMicroBatchesMax));
  const double divisor = options.gradient_divisor.value_or(1);
  if (!(divisor > 0) || !std::isnormal(static_cast<float>(1 / divisor)))
    fail(
        fmt::format("gradient_divisor is {}; it must be finite and positive, and its inverse must "
                    "be a normal number of fp32",
                    divisor));
  const std::vector<double>& rates = options.group_learning_rates;
  if (!rates.empty() && rates.size() != config_.optimizer.groups.size())
    fail(fmt::format("group_learning_rates has {} entries, but optimizer.groups has {}",
                     rates.size(), config_.optimizer.groups.size()));
  for (std::size_t i = 0; i < rates.size(); ++i)
    check_rate(fmt::format("group_learning_rates[{}]", i), rates[i]);
  if (!rates.empty()) return;
  const std::vector<Config::Optimizer::Group>& groups = config_.optimizer.groups;
  for (std::size_t i = 0; i < groups.size(); ++i)
    check_rate(fmt::format("learning_rate times learning_rate_factor of optimizer.groups[{}]", i),
               options.learning_rate * groups[i].learning_rate_factor);
}

StepTerms::End StepTerms::end(const FinishOptions& finish, OverlapPolicy policy) const {
  StepOptions options = options_;
  if (finish.learning_rate) options.learning_rate = *finish.learning_rate;
  if (finish.gradient_divisor) options.gradient_divisor = *finish.gradient_divisor;
  if (finish.group_learning_rates) options.group_learning_rates = *finish.group_learning_rates;
  check("finish", options);
  const bool is_announced = options.learning_rate == options_.learning_rate &&
                            options.group_learning_rates == options_.group_learning_rates &&
                            options.gradient_divisor.value_or(options.micro_batches) ==
                                options_.gradient_divisor.value_or(options_.micro_batches);
  if (!is_announced && policy == OverlapPolicy::kEager)
    throw Error(ErrorCode::kInvalidArgument,
                "finish: learning rate or divisor differ from those of begin_step(), with which "
                "optimizer.overlap \"eager\" has already updated blocks (\"auto\" is eager where "
                "nothing is clipped); give them to begin_step() or set optimizer.overlap to "
                "\"deferred\"");
  return {.options = std::move(options), .is_announced = is_announced};
}

double StepTerms::gradient_count(const StepOptions& options, double loss_scale) const {
  return options.gradient_divisor.value_or(options.micro_batches) * rank_count_ * loss_scale;
}

UnitCoefficients StepTerms::coefficients(const StepOptions& options, const Scaling& scaling,
                                         std::span<const std::uint64_t> versions) const {
  const auto scale =
      static_cast<float>(scaling.clip_factor / gradient_count(options, scaling.loss_scale));
  if (scale == 0)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the factor of the gradients is 0 in fp32, so that they would train "
                            "nothing: optimizer.clip_norm {} and the norm make it {}, and they are "
                            "divided by {}; nothing was updated",
                            config_.optimizer.clip_norm, scaling.clip_factor,
                            gradient_count(options, scaling.loss_scale)));
  UnitCoefficients coefficients;
  std::map<std::uint64_t, std::uint32_t> entries;  // by version
  for (const std::uint64_t version : versions) {
    const auto next = static_cast<std::uint32_t>(coefficients.all.size());
    const auto [entry, is_new] = entries.try_emplace(version, next);
    if (is_new)
      coefficients.all.push_back(
          groups_.coefficients(options.learning_rate, options.group_learning_rates,
                               {.step = scaling.step, .of_unit = version + 1}, scale));
    coefficients.of_unit.push_back(entry->second);
  }
  if (coefficients.all.size() == 1) coefficients.of_unit.clear();
  return coefficients;
}

}  // namespace sluice
