// Makes a detached optimizer whose storage queue is wrapped. Tests use such an optimizer to emulate
// drives that fail. The function is not for applications.
//
// Thread rule: the same as for DetachedOptimizer.
#pragma once

#include <vector>

#include <sluice/detached_optimizer.h>
#include "engine/store/storage_queue.h"

namespace sluice {

struct DetachedOverQueue {
  // Does the same as the constructor of DetachedOptimizer. `decorate` wraps the queue that the
  // optimizer opens. `device` is null if no tensor is on a device.
  static DetachedOptimizer make(const Config& config, std::vector<DetachedTensor> tensors,
                                const QueueDecorator& decorate, Device* device = nullptr);
};

}  // namespace sluice
