#include "tests/gpu/cuda/fake_cuda_log.h"

#include <mutex>
#include <utility>

namespace sluice::test {
namespace {

struct Log {
  std::mutex mutex;
  // Guarded by mutex.
  bool is_wanted = false;
  std::vector<FakeCudaCall> calls;
};

Log& log() {
  static Log only;
  return only;
}

}  // namespace

void log_fake_cuda_calls(bool is_wanted) {
  const std::scoped_lock lock(log().mutex);
  log().is_wanted = is_wanted;
  log().calls.clear();
}

std::vector<FakeCudaCall> take_fake_cuda_calls() {
  const std::scoped_lock lock(log().mutex);
  log().is_wanted = false;
  return std::exchange(log().calls, {});
}

void add_fake_cuda_call(const FakeCudaCall& call) {
  const std::scoped_lock lock(log().mutex);
  if (log().is_wanted) log().calls.push_back(call);
}

}  // namespace sluice::test
