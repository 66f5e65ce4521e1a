// The fingerprint of a training state: SHA-256 over the step (u64, little-endian), then for each
// tensor in model order, without padding: compute parameters, fp32 master, exp_avg, exp_avg_sq.
// Equal states have equal hashes wherever they live.
#pragma once

#include <string>

#include <sluice/engine.h>

namespace sluice {

// 64 hexadecimal digits.
// Requires: no step is active.
std::string state_sha256(Engine& engine);

}  // namespace sluice
