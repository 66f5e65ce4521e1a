// The state of the stand-in for the CUDA runtime. Only the source files of the stand-in include
// this header. Thread rule: any thread may call every function.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <sluice/error.h>
#include <sluice/host_device.h>
#include "tests/gpu/cuda/fake_cuda_log.h"
#include "tests/gpu/cuda/fake_cuda_runtime.h"

namespace sluice::test {

struct FakeCudaState {
  std::unique_ptr<HostDevice> device = make_host_device({.memory_bytes = kFakeCudaMemoryBytes});
  std::mutex callback_mutex;
  std::atomic<int> failed{0};
  std::atomic<bool> refuses_callbacks{false};
  std::atomic<bool> refuses_next_callback{false};
  std::atomic<FakeCudaBatches> batches{FakeCudaBatches::kTaken};
  std::mutex mutex;
  // Guarded by mutex.
  std::map<std::byte*, std::uint64_t> registered;
  std::map<const std::byte*, std::uint64_t> allocated;
  std::map<StreamId, int> stream_gpus;
  std::vector<StreamId> streams_left;  // destroyed after a failure
  std::map<EventId, int> event_gpus;
  std::set<int> contexts;                        // GPUs on which the process has a context
  std::map<int, int> communicators;              // by GPU
  std::set<std::pair<int, std::string>> loaded;  // kernels, by GPU
  std::set<std::string> loaded_late;
  std::function<void()> at_gpu_change;
  std::string pci_address;  // empty: each GPU has one of its own
};

FakeCudaState& runtime();
// Returns the current GPU of this thread.
int& current_device();
// Returns whether this thread has called the runtime. A call of the runtime makes a context
// current. The driver's own functions need a current context.
bool& has_current_context();

// In the functions below, a returned int is a cudaError_t. `stream` is a cudaStream_t, and `event`
// is a cudaEvent_t.

// After a failure of the device, every call returns this failure. standing_failure() returns 0 if
// the device has not failed.
int standing_failure();
// Every call of the runtime begins with this function. The function makes a context on the thread's
// current GPU, even if the arguments of the call belong to another GPU. Returns 0 or the failure of
// the call.
int enter_fake_cuda(const char* call);
// Every function of the stand-in begins with this macro, except functions that release something. A
// release always takes place. Behind the macro, a function does not ask for the device's failure
// again, except after a wait. Otherwise, while another thread lets the device fail, a function
// could do its work and still return the failure.
#define FAKE_CUDA_ENTER                                                        \
  if (const auto failed = static_cast<cudaError_t>(enter_fake_cuda(__func__)); \
      failed != cudaSuccess)                                                   \
  return failed

StreamId id_of_stream(const void* stream);
EventId id_of_event(const void* event);
int gpu_of_stream(const void* stream);
int gpu_of_event(const void* event);

bool is_device_memory(const void* memory);
void log_call(FakeCudaCall::Kind kind, const void* stream, const void* event = nullptr);

}  // namespace sluice::test
