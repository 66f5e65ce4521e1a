// A stream of the CUDA device. The struct has the runtime's handles, and the host functions that
// have not run yet.
// Thread rule: the comment at each member states the rule of that member.
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
  bool is_adopted = false;        // the application destroys `stream`
  CUevent_st* reached = nullptr;  // recorded by synchronize()

  std::shared_ptr<HostCallQueue> calls;  // may be in use after the stream is gone

  std::mutex starting;  // held so that functions get their numbers in the stream's order
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t refused_calls = 0;  // refused calls that have not run yet; guarded by mutex
};

}  // namespace sluice
