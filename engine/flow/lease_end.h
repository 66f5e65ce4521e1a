// The event that marks the end of the work under a lease. Thread rule: any thread.
#pragma once

#include <sluice/device.h>

namespace sluice {

// The function records `event` behind the work on `stream`, and behind the work that `event` marked
// before. That earlier work may be on another stream.
inline void record_lease_end(Device& device, EventId event, StreamId stream) noexcept {
  try {
    device.wait(stream, event);
    device.record(event, stream);
  } catch (...) {
    // If the application has destroyed the stream, the stream has waited for all of its work.
    // Otherwise the device has failed, and the next synchronize() says so.
  }
}

}  // namespace sluice
