// Waits for a stream when it goes, also when an exception passes: work that was enqueued uses local
// variables of the function that leaves. Both must outlive it. Thread rule: one thread.
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
      // The failure that is on its way already, or the one that it led to.
    }
  }

 private:
  Device& device_;
  const Stream& stream_;
};

}  // namespace sluice
