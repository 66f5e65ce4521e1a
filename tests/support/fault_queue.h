// An IoQueue that wraps a real queue and injects faults that are rare on real drives and kernels.
// Some faults are faults of the kernel, such as failed transfers and short transfers. The rules of
// io/transfer_progress.h have to handle these faults. Other faults are faults of the drive: lost,
// misplaced and altered writes. The queue does not report faults of the drive. The same seed and
// the same order of submission give the same faults.
#pragma once

#include <cstdint>
#include <memory>

#include "io/io_queue.h"

namespace sluice::test {

enum class Fault : std::uint8_t {
  kNone,
  // Faults of the kernel.
  kErrno,          // an attempt fails with `error`
  kHalf,           // an attempt moves half of its bytes
  kOneBlockShort,  // an attempt moves all but its last 4 KiB
  kZeroBytes,      // an attempt moves nothing
  kDelayed,        // the request is held for some milliseconds
  kReordered,      // the requests of the next milliseconds overtake this request
  kHang,           // the request is held until wait_idle() or destruction
  // Faults of the drive. These faults affect only writes. If the chosen request reads, the fault
  // affects the next request that writes.
  kBitFlip,      // one bit of the written data is flipped
  kLostWrite,    // nothing is written
  kMisdirected,  // written to the place of an earlier write of the same length
};

struct FaultOptions {
  std::uint64_t seed = 1;
  Fault fault = Fault::kErrno;
  // The number of the request that meets the fault. The first request of the queue has number 0. If
  // `sticky` is true, later requests meet the fault, too.
  std::uint64_t at = UINT64_MAX;
  int error = 0;  // for kErrno
  bool sticky = false;
  // Each request first waits a random time up to this limit. Other requests may overtake a waiting
  // request.
  std::uint32_t delay_us_max = 0;
};

class FaultQueue : public IoQueue {
 public:
  // The function struck() returns the number of requests that have met the fault so far. The
  // function struck_offset_bytes() returns the offset that the last request with a fault asked for.
  virtual std::uint64_t struck() const = 0;
  virtual std::uint64_t struck_offset_bytes() const = 0;
};

std::unique_ptr<FaultQueue> make_fault_queue(std::unique_ptr<IoQueue> inner,
                                             const FaultOptions& options);

}  // namespace sluice::test
