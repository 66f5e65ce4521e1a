// A stream of the CUDA device: the runtime's handles, and the host functions that have not run yet.
// Thread rule: stated at each member.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "gpu/device/host_call_queue.h"

// A cudaStream_t points to a CUstream_st, and a cudaEvent_t points to a CUevent_st.
struct CUstream_st;
struct CUevent_st;

namespace sluice {

struct CudaStream {
  CUstream_st* stream = nullptr;
  bool is_adopted = false;        // the application destroys it
  CUevent_st* reached = nullptr;  // recorded by synchronize()

  std::shared_ptr<HostCallQueue> calls;  // the runtime's threads may call after the stream is gone

  std::mutex starting;  // functions get their numbers in the order of the stream
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t refused_calls = 0;  // those that have not run yet; guarded by mutex
};

}  // namespace sluice
