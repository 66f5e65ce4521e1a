// Slows down the writes of a checkpoint beside training, so that the steps of a test overtake the
// checkpoint. Can also make one of these writes fail.
//
// Thread rule: set and reset while no such write is under way.
#pragma once

#include <chrono>

namespace sluice::test {

// While this object exists, each pwrite() of a thread that writes blocks waits. Only one such
// object may exist at a time.
class SlowWrites {
 public:
  explicit SlowWrites(std::chrono::microseconds wait);
  ~SlowWrites();
  SlowWrites(const SlowWrites&) = delete;
  SlowWrites& operator=(const SlowWrites&) = delete;
};

// The calls of pwrite() by these threads so far.
int count_writes();
// Lets one call of these threads fail with `error`: the call with this number, counted from 0 from
// now on.
void fail_write(int number, int error);
void fail_sync(int number, int error);

}  // namespace sluice::test
