// A stream of the CUDA device: the runtime's handles, and the host functions that have not run yet.
// Thread rule: beside the members.
#pragma once

#include <cuda_runtime.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "gpu/device/host_call_queue.h"

namespace sluice {

struct CudaStream {
  cudaStream_t stream = nullptr;
  cudaEvent_t reached = nullptr;  // recorded by synchronize()

  std::shared_ptr<HostCallQueue> calls;  // the runtime's threads may call after the stream is gone

  std::mutex starting;  // functions get their numbers in the order of the stream
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t refused_calls = 0;  // those that have not run yet; guarded by mutex
};

}  // namespace sluice
