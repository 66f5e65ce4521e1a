// Makes an engine with a wrapped storage queue. With the wrapper, tests and benchmarks can slow the
// drive down, or can make requests fail. Applications do not use this header.
//
// Thread rule: the same as for Engine.
#pragma once

#include <sluice/engine.h>
#include "engine/store/storage_queue.h"

namespace sluice {

struct EngineOverQueue {
  // Does the same as the constructor of Engine. `decorate` wraps the queue that the engine opens.
  static Engine make(const Config& config, const ModelSpec& model, Device& device,
                     const QueueDecorator& decorate, Collectives* ranks = nullptr);
};

}  // namespace sluice
