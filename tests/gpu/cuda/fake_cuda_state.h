// The state of the stand-in for the CUDA runtime, for the files that the stand-in consists of.
// Thread rule: every function from any thread.
#pragma once

#include <cuda_runtime.h>

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

extern thread_local int current_device;

cudaError_t answer(int status);
// The answer of every call after a failure of the device.
cudaError_t standing();
// A call makes a context on the thread's current GPU, whatever GPU its arguments belong to.
cudaError_t enter(const char* call);
// Every call of the stand-in begins so. Calls that give something back do it in any case.
#define FAKE_CUDA_ENTER \
  if (const cudaError_t failed = enter(__func__); failed != cudaSuccess) return failed

template <class Handle, class Id>
Handle handle_of(Id id) {
  return reinterpret_cast<Handle>(static_cast<std::uintptr_t>(id));
}
inline StreamId id_of(cudaStream_t stream) {
  SLUICE_CHECK(stream != nullptr, "nothing uses the default stream");
  return static_cast<StreamId>(reinterpret_cast<std::uintptr_t>(stream));
}
inline EventId id_of(cudaEvent_t event) {
  return static_cast<EventId>(reinterpret_cast<std::uintptr_t>(event));
}

int gpu_of(cudaStream_t stream);
int gpu_of(cudaEvent_t event);

bool is_device_memory(const void* memory);
void log_call(FakeCudaCall::Kind kind, cudaStream_t stream, cudaEvent_t event = nullptr);

}  // namespace sluice::test
