// A drive with stated limits: an IoQueue that passes every request on to a real queue, and
// completes it no sooner than a drive of the given bandwidth and latency would have. For benchmarks
// and tests, because the speed of real drives drifts; limits well below the real drive's are exact.
// The emulated drive takes up one request at a time in each direction (half duplex: one in all), by
// priority and then in order of arrival, moves it at the stated rate, and answers `latency` later,
// in that order. Every time is computed from the arrivals and not from a thread's wake-up, so that
// no overshoot adds up; waiting costs no CPU.
//
// Thread rule: as IoQueue. Callbacks run on a thread of this queue, in order of completion.
// Invariants: as IoQueue; the owner of a request sees the real queue's result (bytes, errno).
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
  std::uint64_t latency_ns = 0;  // of each request, beside its transfer time; overlaps with others
  // A flush takes its turn among the writes (half duplex: among all) and takes the drive this long.
  std::uint64_t flush_ns = 0;
};

class ThrottledQueue : public IoQueue {
 public:
  // How much later the real drive was than the emulated one, summed over all requests. It shows how
  // far the limits were not the only ones.
  virtual std::uint64_t late_ns() const = 0;
};

// Fails with: kInvalidArgument when a rate is out of bounds.
std::unique_ptr<ThrottledQueue> make_throttled_queue(std::unique_ptr<IoQueue> drive,
                                                     const ThrottleOptions& options);

}  // namespace sluice
