// The arithmetic of one block's update on the device, with the bits of the update on the CPU
// (engine/flow/block_update.h).
//
// Thread rule: as Device.
#pragma once

#include <cstdint>

#include "engine/flow/block_update.h"
#include "gpu/math/device_math.h"

namespace sluice {

// Enqueues the update of `block`. All planes are device memory. The update sets `overflow`, a word
// of device memory, to 1 if a weight or a moment overflows.
void update_block_on_device(const Layout& layout, const BlockPlace& block,
                            const BlockPlanes& planes, const StepCoefficients& coefficients,
                            std::uint32_t* overflow, DeviceMath& math, StreamId stream);

}  // namespace sluice
