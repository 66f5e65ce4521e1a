// The calls that the stand-in for the CUDA runtime receives, in the order in which they arrive.
// Thread rule: any thread may call every function.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace sluice::test {

struct FakeCudaCall {
  enum class Kind : std::uint8_t {
    kCopyUp,
    kCopyDown,
    kCopyInside,
    kFill,
    kKernel,
    kRecord,
    kWait,
    kCallback
  };

  Kind kind{};
  std::uint64_t stream = 0;
  std::uint64_t event = 0;       // of a record or a wait
  std::uint64_t size_bytes = 0;  // of a copy
  const std::byte* target = nullptr;
  const std::byte* source = nullptr;
  bool is_continued = false;  // the copy belongs to the same call as the copy before
};

// If `is_wanted` is true, begins a new log. If `is_wanted` is false, later calls are not logged.
void log_fake_cuda_calls(bool is_wanted);
// Ends the log and returns it.
std::vector<FakeCudaCall> take_fake_cuda_calls();

// Delays the beginning of every kernel that is launched after this call by `delay`. So work that
// should wait for a kernel, but does not wait, runs before the kernel.
void delay_fake_cuda_kernels(std::chrono::microseconds delay);

// The stand-in calls this function for each call that it logs.
void add_fake_cuda_call(const FakeCudaCall& call);
// The stand-in calls this function. The result is a kernel's work that first waits for the delay.
std::function<void()> delayed(std::function<void()> work);

}  // namespace sluice::test
