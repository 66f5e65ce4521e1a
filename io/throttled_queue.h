// An IoQueue that emulates a slower drive on top of a real drive. The queue passes every request on
// to a real queue. The throttled queue completes a request no earlier than a drive with the given
// bandwidth and latency would complete the request. Benchmarks and tests use the throttled queue,
// because the speed of real drives varies over time. The throttled queue has exactly the given
// bandwidth and latency if the real drive is clearly faster. The emulated drive works on one read
// and one write at a time. With half duplex, the emulated drive works on only one request at a
// time. The drive takes requests in the order of their priorities. Requests of the same priority
// are taken in the order of arrival. The bytes of a request move at the given rate. A request
// completes `latency_ns` after the transfer of its bytes. So the drive completes requests in the
// same order in which the drive takes requests. All times are computed from the times of arrival,
// not from the times at which threads wake up. So delays do not add up. Waiting uses no processor
// time.
//
// Thread rule: the same as for IoQueue. Callbacks run on a thread of this queue, in order of
// completion. Invariants: all invariants of IoQueue hold for this queue, too. The owner of a
// request sees the real queue's result (bytes, errno).
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
  // The time for which a flush occupies the drive. A flush waits in the queue of the writes. With
  // half duplex, a flush waits in the queue of all requests.
  std::uint64_t flush_ns = 0;
  // The size of the drive's write cache (io/write_cache_model.h); 0 = none. A flush first writes
  // the contents of this cache.
  std::uint64_t write_cache_bytes = 0;
};

class ThrottledQueue : public IoQueue {
 public:
  // Returns the sum of the delays of all requests. A request is delayed if the real drive completes
  // the request later than the emulated drive would. The delay is the difference between these two
  // times. A result above 0 shows that the real drive was sometimes slower than the given limits.
  virtual std::uint64_t late_ns() const = 0;
};

// Fails with kInvalidArgument if a rate is out of bounds.
std::unique_ptr<ThrottledQueue> make_throttled_queue(std::unique_ptr<IoQueue> drive,
                                                     const ThrottleOptions& options);

}  // namespace sluice
