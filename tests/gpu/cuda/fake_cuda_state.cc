#include "tests/gpu/cuda/fake_cuda_state.h"

#include <cstddef>

#include "tests/gpu/cuda/fake_cuda_faults.h"

namespace sluice::test {

thread_local int current_device = 0;

FakeCudaState& runtime() {
  static FakeCudaState fake;
  return fake;
}

cudaError_t answer(int status) {
  return static_cast<cudaError_t>(fake_cuda_answer(status));
}
cudaError_t standing() {
  return answer(runtime().failed);
}
cudaError_t enter(const char* call) {
  const int fault = fake_cuda_fault_of(call);
  const std::scoped_lock lock(runtime().mutex);
  runtime().contexts.insert(current_device);
  return fault != 0 ? answer(fault) : standing();
}
int gpu_of(cudaStream_t stream) {
  const std::scoped_lock lock(runtime().mutex);
  return runtime().stream_gpus.at(id_of(stream));
}
int gpu_of(cudaEvent_t event) {
  const std::scoped_lock lock(runtime().mutex);
  return runtime().event_gpus.at(id_of(event));
}

bool is_device_memory(const void* memory) {
  const std::scoped_lock lock(runtime().mutex);
  const auto* const address = static_cast<const std::byte*>(memory);
  auto entry = runtime().allocated.upper_bound(address);
  if (entry == runtime().allocated.begin()) return false;
  --entry;
  return address < entry->first + entry->second;
}

void log_call(FakeCudaCall::Kind kind, cudaStream_t stream, cudaEvent_t event) {
  add_fake_cuda_call({.kind = kind,
                      .stream = reinterpret_cast<std::uintptr_t>(stream),
                      .event = reinterpret_cast<std::uintptr_t>(event)});
}

}  // namespace sluice::test
