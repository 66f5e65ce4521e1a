// The gradient norm of a model that the application splits itself, by tensor or pipeline
// parallelism. Each process of such an application has an engine for its part of the model. The
// processes that together have the whole model form a norm group. All processes of the group use
// the norm of the whole group. So they clip by the same factor, skip the same steps and keep the
// same loss scale as a single engine with the whole model. Plain data.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include <sluice/ids.h>

namespace sluice {

struct NormGroup {
  // The function replaces each number in `sums` with the total over the group, modulo 2^64. For
  // example, the function may call MPI_Allreduce() for unsigned 64-bit integers, in place.
  // Step::finish() and Step::gradient_norm() call the function once, on the thread of the caller,
  // after the gradients and before the update. All members of the group call finish() and
  // gradient_norm() equally often. An exception from the function stops the engine.
  std::function<void(std::span<std::uint64_t> sums)> add = {};
  // The tensors that another member of the group counts in the norm. Both members have the same
  // tensor, with equal values and gradients. Examples are layer norms under tensor parallelism.
  // Exactly one member counts each such tensor, and all other members list the tensor here.
  std::vector<TensorId> counted_elsewhere = {};
};

}  // namespace sluice
