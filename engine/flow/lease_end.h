// Records the event that marks the end of the work under a lease. Thread rule: any thread.
#pragma once

#include <sluice/device.h>

namespace sluice {

// Records `event` on `stream`, after all work that is on this stream now. The event also waits for
// the work that the event marked before this call, even if this work is on another stream.
inline void record_lease_end(Device& device, EventId event, StreamId stream) noexcept {
  try {
    device.wait(stream, event);
    device.record(event, stream);
  } catch (...) {
    // If the application has destroyed the stream, all work on the stream has ended. If the stream
    // still exists, the device has failed, and the next synchronize() reports the failure.
  }
}

}  // namespace sluice
