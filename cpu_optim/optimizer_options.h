// The functions say which moments an optimizer keeps, check hyperparameters, and compute the
// coefficients of a step. The checks are here, because the update functions check nothing. The
// functions are pure, and any thread may call them.
#pragma once

#include <cstdint>
#include <limits>
#include <string_view>

#include <sluice/optimizer.h>
#include "cpu_optim/update.h"

namespace sluice {

// Each function returns whether `kind` keeps the moment in the function's name. Every optimizer
// keeps at least one of the two moments.
bool keeps_exp_avg(OptimizerKind kind);
bool keeps_exp_avg_sq(OptimizerKind kind);

// The update computes in fp32. kEpsilonMin is the smallest normal number of fp32, rounded up. A
// smaller epsilon would lose precision or become 0, and an epsilon above kEpsilonMax would become
// infinite.
constexpr double kEpsilonMin = 1.2e-38;
constexpr double kEpsilonMax = std::numeric_limits<float>::max();

// Fails with kInvalidArgument if a hyperparameter is out of its range. The message gives the
// hyperparameter, its value and its range.
void validate(const OptimizerOptions& options);

// Returns the coefficients of step number `step`. The first step is step 1. Fails with
// kInvalidArgument if step is 0, the learning rate is negative or not finite, or the scale is not
// finite.
UpdateCoefficients coefficients_of(const OptimizerOptions& options, double learning_rate,
                                   std::uint64_t step, float gradient_scale);

}  // namespace sluice
