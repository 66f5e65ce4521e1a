// The arithmetic of one block's update. The optimizer updates all elements of the block. Each
// element is updated with the coefficients of its tensor. The planes of the block may lie anywhere.
//
// Thread rule: worker's thread. The updates of different blocks are independent.
#pragma once

#include <cstdint>
#include <functional>

#include "cpu_optim/cpu_optimizer.h"
#include "engine/plan/layout.h"
#include "engine/plan/parameter_groups.h"

namespace sluice {

// The planes of one block during the block's update. The update changes the parameters and the
// record in place.
struct BlockPlanes {
  std::byte* parameters = nullptr;
  std::byte* record = nullptr;
  const std::byte* gradients = nullptr;  // needed only for an update
};

// Consecutive elements that lie in one block and have the same coefficients.
struct UpdateRun {
  std::uint64_t begin = 0;  // in the block
  std::uint64_t element_count = 0;
  std::uint32_t hyperparameter_set = 0;
  TensorId first_tensor{};
  std::uint64_t first_element = 0;  // where the run begins in `first_tensor`
};
// Divides the block into as few runs as possible. Calls `function` for each run. Padding belongs to
// a neighboring run. With bf16 moments, each run lies in one tensor, because the rounding depends
// on the tensor.
void for_each_run(const Layout& layout, const BlockPlace& block,
                  const std::function<void(const UpdateRun&)>& function);
// Returns the arrays that the optimizer needs for `run`. `rounding_key` is the rounding key of the
// step.
UpdateArrays arrays_of(const StateFormat& format, const BlockPlace& block,
                       const BlockPlanes& planes, const UpdateRun& run, std::uint64_t rounding_key);

// Checks the block after update number `step`.
// Fails with kNonFinite if a weight or a moment has overflowed. The message names the tensor and
// the element.
void throw_if_overflowed(const Layout& layout, const BlockPlace& block, const BlockPlanes& planes,
                         std::uint64_t step);

// Updates `block`. Messages contain `step`, the number of the step.
// Fails with kNonFinite if a weight or a moment overflows. The message names the tensor and the
// element. After this failure, the planes are partly updated and must not be stored.
void update_block(const Layout& layout, const BlockPlace& block, const BlockPlanes& planes,
                  const StepCoefficients& coefficients, std::uint64_t step,
                  CpuOptimizer& optimizer);

}  // namespace sluice
