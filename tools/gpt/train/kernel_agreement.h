// Ranks that compute on hosts have to multiply alike. Otherwise the bits that a run ends with would
// depend on which rank had which batch.
#pragma once

#include <sluice/engine.h>
#include "tools/gpt/train/training_device.h"

namespace sluice {

// Every rank calls it in the same place; for one rank, or on a GPU, it does nothing.
// Fails with: kRanks, naming this rank's library and kernels and a rank that has others.
void require_same_kernels(Engine& engine, const TrainingDevice& device);

}  // namespace sluice
