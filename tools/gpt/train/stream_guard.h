// The destructor waits for a stream, because enqueued work uses the local variables of a function.
// The destructor also waits if an exception leaves that function. Device and stream must outlive
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
      // This failure is being thrown already, or is a consequence of the failure that is being
      // thrown.
    }
  }

 private:
  Device& device_;
  const Stream& stream_;
};

}  // namespace sluice
