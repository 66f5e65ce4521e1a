// Ranks that compute on hosts must use the same kernels for matrix products. Otherwise the bits of
// the result would depend on the assignment of batches to ranks.
#pragma once

#include <sluice/engine.h>
#include "tools/gpt/train/compute_device.h"

namespace sluice {

// All ranks must make this call at the same point. The call does nothing on a GPU, or if there is
// only one rank.
// Fails with kRanks if the kernels of two ranks differ. The message names this rank's library and
// kernels. The message also names a rank that has other kernels.
void require_same_kernels(Engine& engine, const ComputeDevice& device);

}  // namespace sluice
