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
  bool is_continued = false;  // the copy belongs to the call before, which has several
};

// If `is_wanted`, begins a log. Otherwise, continues without a log.
void log_fake_cuda_calls(bool is_wanted);
// Ends the log and returns it.
std::vector<FakeCudaCall> take_fake_cuda_calls();

// Kernels that are launched from now on begin this much later than their streams allow. So work
// that should wait for a kernel, and does not, comes before the kernel.
void delay_fake_cuda_kernels(std::chrono::microseconds delay);

// For the stand-in.
void add_fake_cuda_call(const FakeCudaCall& call);
// For the stand-in: a kernel's work with its delay.
std::function<void()> delayed(std::function<void()> work);

}  // namespace sluice::test
