// The hyperparameters of each tensor's update. By default, a tensor has the hyperparameters that
// the config gives for the whole model. The model may exclude a tensor from weight decay. If groups
// in the config name the tensor, the first of these groups may change the tensor's values. Tensors
// share a set of hyperparameters if they are in the same group and have the same decay. The
// coefficients of each set are computed once per step.
//
// Thread rule: the object is constant after construction, and any thread may use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include <sluice/config.h>
#include <sluice/model_spec.h>
#include "cpu_optim/optimizer_options.h"

namespace sluice {

// The coefficients of a unit's update in one step. There is one entry for each set of
// hyperparameters. `rounding_key` is the step's key for the rounding of bf16 moments
// (base/moment_rounding.h).
struct StepCoefficients {
  std::vector<UpdateCoefficients> of_set;
  std::uint64_t rounding_key = 0;
};

// The coefficients of all units. Units that have seen the same number of updates share their
// coefficients.
struct UnitCoefficients {
  std::vector<StepCoefficients> all;
  std::vector<std::uint32_t> of_unit;  // by unit: index in `all`; if empty, `all` has one entry

  const StepCoefficients& of(UnitId unit) const {
    return all[of_unit.empty() ? 0 : of_unit[index_of(unit)]];
  }
};

// The step's number determines the random bits of rounding. The bias correction depends on the
// number of the unit's updates, including this update. Both numbers count from 1.
struct UpdateNumbers {
  std::uint64_t step = 0;
  std::uint64_t of_unit = 0;
};

class ParameterGroups {
 public:
  // Requires: `model` is a result of validated().
  // Fails with kConfig if a pattern matches no tensor, or if all tensors of a group belong to
  // earlier groups. The message names the pattern or the group.
  ParameterGroups(const Config::Optimizer& optimizer, const ModelSpec& model);

  // The list has one element for each tensor, in the order of the model. The element is the index
  // of the tensor's set of hyperparameters.
  std::span<const std::uint32_t> set_of_tensors() const { return set_of_tensors_; }
  // `group_learning_rates` has one rate for each group of the config, or is empty. If the list is
  // empty, a group's rate is `learning_rate` times the group's factor.
  // The requirements are the same as for coefficients_of().
  StepCoefficients coefficients(double learning_rate, std::span<const double> group_learning_rates,
                                UpdateNumbers numbers, float gradient_scale) const;

 private:
  struct Set {
    std::optional<std::size_t> group =
        {};  // index in the config; a group's rate may differ from step to step
    double learning_rate_factor = 1;
    double weight_decay = 0;
    bool operator==(const Set&) const = default;
  };

  std::uint32_t index_of(const Set& set);

  OptimizerOptions options_;
  std::uint64_t rounding_seed_ = 0;
  std::vector<Set> sets_;
  std::vector<std::uint32_t> set_of_tensors_;
};

// Whether `pattern` matches the whole of `name`. A '*' matches any number of characters, including
// none. A '?' matches one character.
bool matches_pattern(std::string_view pattern, std::string_view name);

}  // namespace sluice
