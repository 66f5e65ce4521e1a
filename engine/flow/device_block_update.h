// The arithmetic of one block's update on the device. The results have the same bits as the results
// of the update on the CPU (engine/flow/block_update.h).
//
// Thread rule: the same as for Device.
#pragma once

#include <cstdint>

#include "engine/flow/block_update.h"
#include "gpu/math/device_math.h"

namespace sluice {

// Enqueues the update of `block`. All planes lie in device memory. `overflow` points to a word in
// device memory. The update sets this word to 1 if a weight or a moment overflows.
void update_block_on_device(const Layout& layout, const BlockPlace& block,
                            const BlockPlanes& planes, const StepCoefficients& coefficients,
                            std::uint32_t* overflow, DeviceMath& math, StreamId stream);

}  // namespace sluice
