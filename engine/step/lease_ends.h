// This class knows the ends of the work under released leases. Leases may be released in any order.
// Work on one stream ends in order. So on each stream, the end of the lease that was released last
// is the end of all work under leases there.
//
// Thread rule: the application's thread.
#pragma once

#include <map>

#include <sluice/device.h>

namespace sluice {

class LeaseEnds {
 public:
  // Called when a step or an inference begins.
  void begin() { last_.clear(); }
  // Called when a lease has been released. The event `released` is recorded on `stream`.
  void note(StreamId stream, EventId released) { last_.insert_or_assign(stream, released); }
  // Waits until the work under all released leases has ended. The call ignores a failure of the
  // device. The device keeps the failure, and reports the failure at the application's own
  // synchronize().
  void await(Device& device) const noexcept {
    for (const auto& [stream, released] : last_) {
      try {
        device.synchronize(released);
      } catch (...) {
        continue;
      }
    }
  }

 private:
  std::map<StreamId, EventId> last_;  // by stream: of the lease that was released last
};

}  // namespace sluice
