// Records the event that marks the end of the work under a lease. Thread rule: any thread.
#pragma once

#include <sluice/device.h>

namespace sluice {

// Records `event` on `stream`, after all work that is on this stream now. If the event has already
// marked work on another stream, the event also waits for that work.
inline void record_lease_end(Device& device, EventId event, StreamId stream) noexcept {
  try {
    device.wait(stream, event);
    device.record(event, stream);
  } catch (...) {
    // If the application has destroyed the stream, all work on the stream has ended. An error while
    // the stream exists means that the device has failed. The next synchronize() reports this
    // failure.
  }
}

}  // namespace sluice
