// Ranks that compute on hosts must use the same kernels for matrix products. Otherwise the bits of
// the result would depend on the assignment of batches to ranks.
#pragma once

#include <sluice/engine.h>
#include "tools/gpt/train/compute_device.h"

namespace sluice {

// Every rank makes this call in the same place. The call does nothing for one rank, or on a GPU.
// Fails with kRanks if the kernels of two ranks differ. The message names this rank's library and
// kernels, and a rank whose kernels differ.
void require_same_kernels(Engine& engine, const ComputeDevice& device);

}  // namespace sluice
