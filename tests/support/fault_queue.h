// An IoQueue that wraps a real one and does what real drives and kernels do too rarely. Faults of
// the kernel (errno, short transfers) are injected below the rules of io/transfer_progress.h, which
// then have to deal with them; faults of the drive (lost, misplaced and altered writes) go
// unreported. Seeded: the same seed does the same in the same order of submission.
#pragma once

#include <cstdint>
#include <memory>

#include "io/io_queue.h"

namespace sluice::test {

enum class Fault : std::uint8_t {
  kNone,
  // Faults of the kernel.
  kErrno,          // an attempt is answered with `error`
  kHalf,           // an attempt moves half
  kOneBlockShort,  // an attempt moves all but its last 4 KiB
  kZeroBytes,      // an attempt moves nothing
  kDelayed,        // the request is held for some milliseconds
  kReordered,      // the request goes after those submitted within some milliseconds
  kHang,           // the request is held until wait_idle() or destruction
  // Faults of the drive; they concern writes, and make the next write theirs where a read is
  // chosen.
  kBitFlip,      // one bit of what was written is another
  kLostWrite,    // nothing is written
  kMisdirected,  // written to the place of an earlier write of the same length
};

struct FaultOptions {
  std::uint64_t seed = 1;
  Fault fault = Fault::kErrno;
  // The request (counted from 0 over the queue's life) that meets the fault; later ones too when
  // `sticky`.
  std::uint64_t at = UINT64_MAX;
  int error = 0;  // for kErrno
  bool sticky = false;
  // Each request waits a random time up to this before it goes on, and is overtaken by others
  // meanwhile.
  std::uint32_t delay_us_max = 0;
};

class FaultQueue : public IoQueue {
 public:
  // How many requests have met the fault so far, and where the last one's bytes should have gone.
  virtual std::uint64_t struck() const = 0;
  virtual std::uint64_t struck_offset_bytes() const = 0;
};

std::unique_ptr<FaultQueue> make_fault_queue(std::unique_ptr<IoQueue> inner,
                                             const FaultOptions& options);

}  // namespace sluice::test
