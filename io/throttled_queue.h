// An IoQueue that emulates a drive with given limits. The queue passes every request to a real
// queue. The queue completes the request no sooner than a drive of the given bandwidth and latency
// would. The queue is for benchmarks and tests, because the speed of real drives drifts. A limit is
// exact if it is well below the limits of the real drive. The emulated drive works on one request
// at a time in each direction. With half duplex, the emulated drive works on only one request in
// all. Requests are taken by priority, and then in the order of arrival. The bytes of a request
// move at the given rate. Requests complete in the same order, `latency` later. All times are
// computed from the arrivals and not from a thread's wake-up, so that no overshoot adds up. Waiting
// costs no CPU.
//
// Thread rule: as IoQueue. Callbacks run on a thread of this queue, in order of completion.
// Invariants: as IoQueue. The owner of a request sees the real queue's result (bytes, errno).
#pragma once

#include <cstdint>
#include <memory>

#include "io/duplex.h"
#include "io/io_queue.h"

namespace sluice {

struct ThrottleOptions {
  // Bytes per second; 0 = no limit. Bounds: 0, or at least 1 MB/s.
  std::uint64_t read_bytes_per_second = 0;
  std::uint64_t write_bytes_per_second = 0;
  Duplex duplex = Duplex::kFull;
  std::uint64_t latency_ns = 0;  // per request, after its transfer; overlaps with other requests
  // A flush takes its turn among the writes and occupies the drive for this time. With half duplex,
  // a flush takes its turn among all requests.
  std::uint64_t flush_ns = 0;
  // The drive's write cache (io/write_cache_model.h); 0 = none. A flush first writes the contents
  // of this cache.
  std::uint64_t write_cache_bytes = 0;
};

class ThrottledQueue : public IoQueue {
 public:
  // The time by which the real drive was later than the emulated drive, summed over all requests. A
  // result above 0 shows that the given limits were not the only limits.
  virtual std::uint64_t late_ns() const = 0;
};

// Fails with kInvalidArgument if a rate is out of bounds.
std::unique_ptr<ThrottledQueue> make_throttled_queue(std::unique_ptr<IoQueue> drive,
                                                     const ThrottleOptions& options);

}  // namespace sluice
