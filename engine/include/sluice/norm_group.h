// A norm group has one gradient norm for a model that is split by tensor or pipeline parallelism.
// The application itself splits the model. Each process of such an application has an engine for
// its part of the model. A norm group consists of the processes that have the whole model together.
// All processes of the group use the norm of the whole group. So the processes clip by the same
// factor, skip the same steps and keep the same loss scale. A single engine with the whole model
// would clip by the same factor, skip the same steps and keep the same loss scale. Plain data.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include <sluice/ids.h>

namespace sluice {

struct NormGroup {
  // The function replaces each number in `sums` with the total over the group, modulo 2^64. For
  // example, the function may call MPI_Allreduce() in place, with unsigned 64-bit integers.
  // Step::finish() and Step::gradient_norm() each call the function once, on the thread of the
  // caller. The call comes after the computation of the gradients, and before the update. All
  // members of the group call finish() and gradient_norm() equally often. An exception from the
  // function stops the engine.
  std::function<void(std::span<std::uint64_t> sums)> add = {};
  // The tensors that another member of the group counts in the norm. Such a tensor exists on
  // several members, with equal values and gradients. Examples are layer norms under tensor
  // parallelism. Exactly one member counts each such tensor, and all other members list the tensor
  // here.
  std::vector<TensorId> counted_elsewhere = {};
};

}  // namespace sluice
