#include "tests/gpu/cuda/fake_cuda_log.h"

#include <atomic>
#include <mutex>
#include <thread>
#include <utility>

namespace sluice::test {
namespace {

struct Log {
  std::mutex mutex;
  // Guarded by mutex.
  bool is_wanted = false;
  std::vector<FakeCudaCall> calls;
};

std::atomic<std::chrono::microseconds> kernel_delay{};

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

void delay_fake_cuda_kernels(std::chrono::microseconds delay) {
  kernel_delay = delay;
}

std::function<void()> delayed(std::function<void()> work) {
  const std::chrono::microseconds delay = kernel_delay;
  if (delay.count() == 0) return work;
  return [delay, work = std::move(work)] {
    std::this_thread::sleep_for(delay);
    work();
  };
}

}  // namespace sluice::test
