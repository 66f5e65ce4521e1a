#include "tests/gpu/cuda/fake_cuda_state.h"

#include <cstddef>
#include <cstdint>

#include "tests/gpu/cuda/fake_cuda_faults.h"

namespace sluice::test {

FakeCudaState& runtime() {
  static FakeCudaState fake;
  return fake;
}

int& current_device() {
  thread_local int device = 0;
  return device;
}

bool& has_current_context() {
  thread_local bool has_one = false;
  return has_one;
}

int standing_failure() {
  return fake_cuda_answer(runtime().failed);
}

int enter_fake_cuda(const char* call) {
  const int fault = fake_cuda_fault_of(call);
  has_current_context() = true;
  const std::scoped_lock lock(runtime().mutex);
  runtime().contexts.insert(current_device());
  return fault != 0 ? fake_cuda_answer(fault) : standing_failure();
}

StreamId id_of_stream(const void* stream) {
  if (stream == nullptr) stream = fake_cuda_default_stream().load();
  SLUICE_CHECK(stream != nullptr, "nothing uses the default stream");
  return static_cast<StreamId>(reinterpret_cast<std::uintptr_t>(stream));
}
EventId id_of_event(const void* event) {
  return static_cast<EventId>(reinterpret_cast<std::uintptr_t>(event));
}

int gpu_of_stream(const void* stream) {
  const std::scoped_lock lock(runtime().mutex);
  return runtime().stream_gpus.at(id_of_stream(stream));
}
int gpu_of_event(const void* event) {
  const std::scoped_lock lock(runtime().mutex);
  return runtime().event_gpus.at(id_of_event(event));
}

bool is_device_memory(const void* memory) {
  const std::scoped_lock lock(runtime().mutex);
  const auto* const address = static_cast<const std::byte*>(memory);
  auto entry = runtime().allocated.upper_bound(address);
  if (entry == runtime().allocated.begin()) return false;
  --entry;
  return address < entry->first + entry->second;
}

void log_call(FakeCudaCall::Kind kind, const void* stream, const void* event) {
  add_fake_cuda_call({.kind = kind,
                      .stream = reinterpret_cast<std::uintptr_t>(stream),
                      .event = reinterpret_cast<std::uintptr_t>(event)});
}

}  // namespace sluice::test
