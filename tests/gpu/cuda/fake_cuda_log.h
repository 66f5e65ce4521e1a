// A log of the calls to the stand-in for the CUDA runtime. The log has the calls in the order of
// arrival.
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
  bool is_continued = false;  // the copy belongs to the same call as the previous copy
  bool is_pageable = false;   // the host side of the copy is not registered
};

// If `is_wanted` is true, the function begins a new log. If `is_wanted` is false, later calls are
// not logged.
void log_fake_cuda_calls(bool is_wanted);
// The function ends the log, and returns the log.
std::vector<FakeCudaCall> take_fake_cuda_calls();

// This call delays every later kernel by `delay`. The delay exposes work that should wait for a
// kernel but does not wait. Such work then runs before the kernel.
void delay_fake_cuda_kernels(std::chrono::microseconds delay);

// The stand-in calls this function for each call that it logs.
void add_fake_cuda_call(const FakeCudaCall& call);
// The stand-in calls this function. Returns a function that first waits for the delay, and then
// does a kernel's work.
std::function<void()> delayed(std::function<void()> work);

}  // namespace sluice::test
