// The gradient norm of a model that the application splits itself, by tensor or pipeline
// parallelism. Each process then has an engine for its part of the model. The processes that
// together have the whole model form a norm group. With the group's norm, all processes of the
// group clip by the same factor, skip the same steps and keep the same loss scale. An engine with
// the whole model would do the same. Plain data.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include <sluice/ids.h>

namespace sluice {

struct NormGroup {
  // The function replaces each of `sums` by its sum over the group, modulo 2^64. MPI_Allreduce() of
  // unsigned 64-bit integers, in place, does this. Step::finish() and Step::gradient_norm() call
  // the function once, on their own thread, after the gradients and before the update. All members
  // of the group make these calls equally often. An exception stops the engine.
  std::function<void(std::span<std::uint64_t> sums)> add = {};
  // The tensors that another member of the group also has, with equal values and gradients. Layer
  // norms under tensor parallelism are examples. Exactly one member counts each such tensor, and
  // all other members name it here.
  std::vector<TensorId> counted_elsewhere = {};
};

}  // namespace sluice
