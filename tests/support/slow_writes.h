// Slows down the writes of a checkpoint beside training, so that the steps of a test overtake the
// checkpoint. The object can also make one of these writes fail.
//
// Thread rule: an object is made and destroyed while no such write is under way.
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
// One call of these threads fails with `error`. The call that fails has the number `number`,
// counted from 0 from now on.
void fail_write(int number, int error);
void fail_sync(int number, int error);

}  // namespace sluice::test
