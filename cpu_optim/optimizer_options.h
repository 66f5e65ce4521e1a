// The optimizers by name, and the checks of their hyperparameters and arrays. The loops check
// nothing. Pure functions, callable from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include <sluice/optimizer.h>
#include "cpu_optim/update.h"

namespace sluice {

// Which moments `kind` keeps. Every optimizer keeps one moment or both moments.
bool keeps_exp_avg(OptimizerKind kind);
bool keeps_exp_avg_sq(OptimizerKind kind);

// Fails with: kInvalidArgument naming the hyperparameter, its value and its range.
void validate(const OptimizerOptions& options);

// Returns the coefficients of step number `step`; the first step is step 1.
// Fails with: kInvalidArgument when step is 0, when the learning rate is negative or not finite, or
// when the scale is not finite.
UpdateCoefficients coefficients_of(const OptimizerOptions& options, double learning_rate,
                                   std::uint64_t step, float gradient_scale);

// Memory for one run of elements. Fields that the layout or the optimizer does not use stay empty.
struct UpdateBuffers {
  std::span<std::byte> parameter;
  std::span<std::int16_t> low;
  std::span<float> master;
  std::span<float> exp_avg;
  std::span<float> exp_avg_sq;
  std::span<const std::byte> gradient;
};

// Makes the arguments of update_simd() from `buffers`. The memory of the buffers must outlive the
// result.
// Fails with: kInvalidArgument naming a buffer that is missing, is not used, is not aligned to its
// element or does not hold `element_count` elements; kUnsupported when `layout` cannot keep
// parameters of type `parameter`.
UpdateArrays make_update_arrays(OptimizerKind kind, MasterLayout layout, DType parameter,
                                DType gradient, std::uint64_t element_count,
                                const UpdateBuffers& buffers);

}  // namespace sluice
