// The fingerprint of a training state is a SHA-256 hash. The hash covers the step (u64,
// little-endian), and then each tensor in model order, without padding. For each tensor, the hash
// covers the compute parameters, the fp32 master, exp_avg and exp_avg_sq. Equal states have equal
// hashes. The hash does not depend on whether a state lies in memory or on storage.
#pragma once

#include <string>

#include <sluice/engine.h>

namespace sluice {

// Returns the hash as 64 hexadecimal digits.
// Requires: no step is active.
std::string state_sha256(Engine& engine);

}  // namespace sluice
