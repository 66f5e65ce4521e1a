// The arithmetic of one block's update. The optimizer runs over all elements, with each tensor's
// own coefficients, wherever the block's planes are.
//
// Thread rule: worker's thread. Distinct blocks are independent.
#pragma once

#include <cstdint>
#include <functional>

#include "cpu_optim/cpu_optimizer.h"
#include "engine/plan/layout.h"
#include "engine/plan/parameter_groups.h"

namespace sluice {

// The planes of one block during its update. The parameters and the record change in place.
struct BlockPlanes {
  std::byte* parameters = nullptr;
  std::byte* record = nullptr;
  const std::byte* gradients = nullptr;  // needed only for an update
};

// Elements of a block that share their coefficients.
struct UpdateRun {
  std::uint64_t begin = 0;  // in the block
  std::uint64_t element_count = 0;
  std::uint32_t hyperparameter_set = 0;
  TensorId first_tensor{};
  std::uint64_t first_element = 0;  // of the run, in `first_tensor`
};
// Calls `run` for as few runs as possible. Padding belongs to a neighboring run. With moments in
// bf16, which are rounded by tensor, each run lies in one tensor.
void for_each_run(const Layout& layout, const BlockPlace& block,
                  const std::function<void(const UpdateRun&)>& function);
// `rounding_key` is the key of the step.
UpdateArrays arrays_of(const StateFormat& format, const BlockPlace& block,
                       const BlockPlanes& planes, const UpdateRun& run, std::uint64_t rounding_key);

// Checks the result of update `step` on a block.
// Fails with kNonFinite if a weight or a moment has overflowed, naming tensor and element.
void throw_if_overflowed(const Layout& layout, const BlockPlace& block, const BlockPlanes& planes,
                         std::uint64_t step);

// Applies an update to `block`. `step` is the step's number, for messages.
// Fails with kNonFinite if a weight or a moment overflows, naming tensor and element. The planes
// are then partly updated and must not be stored.
void update_block(const Layout& layout, const BlockPlace& block, const BlockPlanes& planes,
                  const StepCoefficients& coefficients, std::uint64_t step,
                  CpuOptimizer& optimizer);

}  // namespace sluice
