// The destructor of a StreamGuard waits for a stream. Enqueued work may therefore use the local
// variables of a function, even if an exception leaves the function. Device and stream must outlive
// the guard.
// Thread rule: one thread.
#pragma once

#include <sluice/device.h>

namespace sluice {

class StreamGuard {
 public:
  StreamGuard(Device& device, const Stream& stream) : device_(device), stream_(stream) {}
  StreamGuard(const StreamGuard&) = delete;
  StreamGuard& operator=(const StreamGuard&) = delete;
  ~StreamGuard() {
    try {
      device_.synchronize(stream_.id());
    } catch (...) {
      // This failure needs no report. Another exception already reports the failure or its cause.
    }
  }

 private:
  Device& device_;
  const Stream& stream_;
};

}  // namespace sluice
