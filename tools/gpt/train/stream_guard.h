// The destructor waits for a stream, also when an exception leaves the function, because enqueued
// work uses the function's local variables. Device and stream must outlive the guard. Thread rule:
// one thread.
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
      // This is the failure that is being thrown already, or a consequence of that failure.
    }
  }

 private:
  Device& device_;
  const Stream& stream_;
};

}  // namespace sluice
