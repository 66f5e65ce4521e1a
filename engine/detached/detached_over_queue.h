// Makes a detached optimizer whose storage queue is wrapped. Tests use it to emulate drives that
// fail. Not for applications.
//
// Thread rule: as DetachedOptimizer.
#pragma once

#include <vector>

#include <sluice/detached_optimizer.h>
#include "engine/store/storage_queue.h"

namespace sluice {

struct DetachedOverQueue {
  // Does the same as the constructor of DetachedOptimizer. `decorate` wraps the queue that the
  // optimizer opens. `device` is null without tensors on a device.
  static DetachedOptimizer make(const Config& config, std::vector<DetachedTensor> tensors,
                                const QueueDecorator& decorate, Device* device = nullptr);
};

}  // namespace sluice
