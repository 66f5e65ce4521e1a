// An IoQueue that emulates a slower drive on top of a real one. The queue passes every request on
// to a real queue. It completes a request no earlier than a drive with the given bandwidth and
// latency would. Benchmarks and tests use it, because the speed of real drives drifts. A limit is
// met exactly if the real drive is clearly faster. The emulated drive works on one read and one
// write at a time. With half duplex, it works on only one request at a time. Requests are taken by
// priority, and then in the order of arrival. The bytes of a request move at the given rate.
// Requests complete in the same order, `latency` later. All times are computed from the arrival
// times, not from when a thread woke up, so that delays do not add up. Waiting costs no CPU.
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
  // How long a flush occupies the drive; a flush takes its turn among the writes. With half duplex,
  // a flush takes its turn among all requests.
  std::uint64_t flush_ns = 0;
  // The size of the drive's write cache (io/write_cache_model.h); 0 = none. A flush first writes
  // the contents of this cache.
  std::uint64_t write_cache_bytes = 0;
};

class ThrottledQueue : public IoQueue {
 public:
  // The time by which the real drive completed requests later than the emulated drive would have,
  // summed over all requests. A result above 0 shows that the real drive was sometimes slower than
  // the given limits.
  virtual std::uint64_t late_ns() const = 0;
};

// Fails with kInvalidArgument if a rate is out of bounds.
std::unique_ptr<ThrottledQueue> make_throttled_queue(std::unique_ptr<IoQueue> drive,
                                                     const ThrottleOptions& options);

}  // namespace sluice
