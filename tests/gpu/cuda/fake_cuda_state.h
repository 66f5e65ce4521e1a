// The state of the stand-in for the CUDA runtime, for the files that the stand-in consists of.
// Thread rule: every function from any thread.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

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
  std::map<EventId, int> event_gpus;
  std::set<int> contexts;                        // GPUs that the process has one on
  std::map<int, int> communicators;              // by GPU
  std::set<std::pair<int, std::string>> loaded;  // kernels, by GPU
  std::set<std::string> loaded_late;
};

FakeCudaState& runtime();
// The current GPU of this thread.
int& current_device();
// Whether this thread has called the runtime. The driver's own functions need the context that such
// a call makes current.
bool& has_current_context();

// The functions below that return an int return a cudaError_t. A `stream` is a cudaStream_t, an
// `event` a cudaEvent_t.

// The answer of every call after a failure of the device.
int standing_failure();
// A call makes a context on the thread's current GPU, whatever GPU its arguments belong to. Returns
// its failure.
int enter_fake_cuda(const char* call);
// Every call of the stand-in begins so. Calls that give something back do it in any case.
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
