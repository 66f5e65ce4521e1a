// A SlowWrites object slows down the writes of a checkpoint that is saved during training. So the
// steps of a test run while the checkpoint is still being written. The functions below can also
// make one of these writes fail.
//
// Thread rule: an object is made and destroyed while no checkpoint is being written.
#pragma once

#include <chrono>

namespace sluice::test {

// While this object exists, every call of pwrite() first waits if the calling thread writes a
// checkpoint. Only one SlowWrites object may exist at a time.
class SlowWrites {
 public:
  explicit SlowWrites(std::chrono::microseconds wait);
  ~SlowWrites();
  SlowWrites(const SlowWrites&) = delete;
  SlowWrites& operator=(const SlowWrites&) = delete;
};

// Returns the number of pwrite() calls so far. Only calls by threads that write checkpoints are
// counted.
int count_writes();
// Makes one later call of pwrite() or fsync() fail with `error`. `number` selects this call. Only
// calls by threads that write checkpoints are counted. The next counted call has the number 0.
void fail_write(int number, int error);
void fail_sync(int number, int error);

}  // namespace sluice::test
