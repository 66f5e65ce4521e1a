#include "tests/gpu/cuda/fake_cuda_runtime.h"

#include <cuda_runtime.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <sluice/error.h>
#include <sluice/host_device.h>
#include <sluice/units.h>
#include "gpu/cuda/cuda_architectures.h"
#include "tests/gpu/cuda/fake_cuda_faults.h"
#include "tests/gpu/cuda/fake_cuda_log.h"
#include "tests/gpu/cuda/fake_cuda_state.h"

namespace sluice::test {
namespace {

cudaError_t answer(int status) {
  return static_cast<cudaError_t>(fake_cuda_answer(status));
}
cudaError_t standing() {
  return static_cast<cudaError_t>(standing_failure());
}
cudaError_t enter(const char* call) {
  return static_cast<cudaError_t>(enter_fake_cuda(call));
}

template <class Handle, class Id>
Handle handle_of(Id id) {
  return reinterpret_cast<Handle>(static_cast<std::uintptr_t>(id));
}

std::function<void()> at_gpu_change() {
  const std::scoped_lock lock(runtime().mutex);
  return runtime().at_gpu_change;
}

std::atomic<int> chosen_capability = 0;

bool has_code_for(int capability) {
  return runs_on_capability(compiled_cuda_architectures(), capability / 10, capability % 10);
}

int compute_capability() {
  int capability = chosen_capability;
  for (int tried = 50; capability == 0; ++tried)
    if (has_code_for(tried)) capability = tried;
  return capability;
}

void load(int gpu, const char* name) {
  const char* const mode = std::getenv("CUDA_MODULE_LOADING");
  const bool is_eager = mode != nullptr && mode == std::string_view("EAGER");
  const std::scoped_lock lock(runtime().mutex);
  const bool is_new = runtime().loaded.emplace(gpu, name).second;
  if (is_new && !is_eager && runtime().communicators[gpu] != 0) runtime().loaded_late.insert(name);
}

}  // namespace

void fail_fake_cuda(FakeCudaFailure failure) {
  runtime().refuses_callbacks = failure.status != 0 && failure.refuses_callbacks;
  runtime().failed = failure.status;
}

bool set_fake_cuda_capability(int capability) {
  chosen_capability = capability;
  return capability != 0 && !has_code_for(capability);
}

void refuse_next_fake_cuda_callback() {
  runtime().refuses_next_callback = true;
}

void set_fake_cuda_pci_address(const std::string& address) {
  const std::scoped_lock lock(runtime().mutex);
  runtime().pci_address = address;
}

void call_at_fake_cuda_gpu_changes(std::function<void()> work) {
  const std::scoped_lock lock(runtime().mutex);
  runtime().at_gpu_change = std::move(work);
}

std::set<int> take_fake_cuda_contexts() {
  const std::scoped_lock lock(runtime().mutex);
  return std::exchange(runtime().contexts, {});
}

void launch_fake_cuda(void* stream, std::function<void()> work, const char* name) {
  const int gpu = gpu_of_stream(stream);
  SLUICE_CHECK(gpu == current_device(), "a kernel's stream is one of the current GPU");
  if (answer(fake_cuda_fault_of("cudaLaunchKernel")) != 0 || standing() != 0) return;
  if (name != nullptr) load(gpu, name);
  log_call(FakeCudaCall::Kind::kKernel, stream);
  runtime().device->launch(id_of_stream(stream), delayed(std::move(work)));
}

std::set<std::string> take_fake_cuda_late_loads() {
  const std::scoped_lock lock(runtime().mutex);
  return std::exchange(runtime().loaded_late, {});
}

void unload_fake_cuda_kernels() {
  const std::scoped_lock lock(runtime().mutex);
  runtime().loaded.clear();
}

void finish_fake_cuda_work() {
  std::vector<StreamId> streams;
  {
    const std::scoped_lock lock(runtime().mutex);
    for (const auto& [stream, gpu] : runtime().stream_gpus) streams.push_back(stream);
  }
  for (const StreamId stream : streams) runtime().device->synchronize(stream);
}

void destroy_fake_cuda_streams_left() {
  std::vector<StreamId> left;
  {
    const std::scoped_lock lock(runtime().mutex);
    left.swap(runtime().streams_left);
  }
  for (const StreamId stream : left) runtime().device->destroy_stream(stream);
}

std::uint64_t fake_cuda_objects() {
  const std::scoped_lock lock(runtime().mutex);
  return runtime().stream_gpus.size() + runtime().event_gpus.size();
}

std::uint64_t fake_cuda_allocated_bytes() {
  return runtime().device->allocated_bytes();
}

std::uint64_t fake_cuda_registered_bytes() {
  const std::scoped_lock lock(runtime().mutex);
  std::uint64_t sum = 0;
  for (const auto& [memory, size_bytes] : runtime().registered) sum += size_bytes;
  return sum;
}
}  // namespace sluice::test

using namespace sluice;
using namespace sluice::test;

extern "C" {

// For libraries that are opened at run time: on threads of theirs, whose current GPU is right.
void sluice_fake_cuda_launch(cudaStream_t stream, void (*work)(void*), void* data) {
  runtime().device->launch(id_of_stream(stream), [work, data] { work(data); });
}

// A communicator comes to a GPU, or goes. Returns how many there are.
int sluice_fake_cuda_communicators(int gpu, int change) {
  const std::scoped_lock lock(runtime().mutex);
  return runtime().communicators[gpu] += change;
}

cudaError_t cudaGetDevice(int* device) {
  const int fault = fake_cuda_fault_of(__func__);
  *device = current_device();
  return fault != 0 ? answer(fault) : standing();
}
// Since CUDA 12 it makes a context.
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kFakeCudaGpus) return answer(cudaErrorInvalidDevice);
  if (const std::function<void()> work = at_gpu_change()) work();
  const int before = std::exchange(current_device(), device);
  const cudaError_t status = enter(__func__);
  if (status != cudaSuccess) current_device() = before;
  return status;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = kFakeCudaGpus;
  return answer(fake_cuda_fault_of(__func__));
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {};
  if (device < 0 || device >= kFakeCudaGpus) return answer(cudaErrorInvalidDevice);
  if (const int fault = fake_cuda_fault_of(__func__); fault != 0) return answer(fault);
  std::strcpy(properties->name, "fake GPU");
  properties->major = compute_capability() / 10;
  properties->minor = compute_capability() % 10;
  properties->totalGlobalMem = kFakeCudaMemoryBytes;
  return cudaSuccess;
}
// With capitals, as the runtime writes it.
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  if (const int fault = fake_cuda_fault_of(__func__); fault != 0) return answer(fault);
  if (device < 0 || device >= kFakeCudaGpus || length < 13) return answer(cudaErrorInvalidDevice);
  std::strcpy(text, "0000:3B:00.0");
  text[11] = static_cast<char>('0' + device);
  const std::scoped_lock lock(runtime().mutex);
  const std::string& chosen = runtime().pci_address;
  if (!chosen.empty() && chosen.size() < static_cast<std::size_t>(length))
    std::strcpy(text, chosen.c_str());
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
  *total_bytes = kFakeCudaMemoryBytes;
  *free_bytes = kFakeCudaMemoryBytes - fake_cuda_allocated_bytes();
  {
    const std::scoped_lock lock(runtime().mutex);
    *free_bytes -= static_cast<std::size_t>(runtime().communicators[current_device()]) *
                   kFakeCommunicatorBytes;
  }
  return enter(__func__);
}
// Off by 256 bytes: all the alignment that CUDA promises. The old contents stay there.
cudaError_t cudaMalloc(void** memory, std::size_t size_bytes) {
  FAKE_CUDA_ENTER;
  try {
    std::byte* const base = runtime().device->allocate(size_bytes + 256, "fake");
    std::memset(base, 0xee, size_bytes + 256);
    *memory = base + 256;
    const std::scoped_lock lock(runtime().mutex);
    runtime().allocated.emplace(base + 256, size_bytes);
  } catch (const Error&) {
    return answer(cudaErrorMemoryAllocation);
  }
  return cudaSuccess;
}
// Waits for the GPU, as CUDA does. Not beside other ranks of this process, which may wait for it.
cudaError_t cudaFree(void* memory) {
  const cudaError_t status = enter(__func__);
  if (is_fake_cuda_fault_armed()) finish_fake_cuda_work();
  {
    const std::scoped_lock lock(runtime().mutex);
    runtime().allocated.erase(static_cast<std::byte*>(memory));
  }
  runtime().device->free(static_cast<std::byte*>(memory) - 256);
  return status;
}
// Nothing: the engine frees memory behind the work that uses it.
cudaError_t cudaDeviceSynchronize() {
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* memory, std::size_t size_bytes, unsigned) {
  FAKE_CUDA_ENTER;
  if (!is_aligned(reinterpret_cast<std::uintptr_t>(memory), 4096) || !is_aligned(size_bytes, 4096))
    return answer(cudaErrorInvalidValue);
  const std::scoped_lock lock(runtime().mutex);
  const bool is_new =
      runtime().registered.emplace(static_cast<std::byte*>(memory), size_bytes).second;
  return is_new ? cudaSuccess : answer(cudaErrorHostMemoryAlreadyRegistered);
}
cudaError_t cudaHostUnregister(void* memory) {
  const cudaError_t status = enter(__func__);
  if (runtime().failed != 0 && is_fake_cuda_fault_armed()) finish_fake_cuda_work();
  const std::scoped_lock lock(runtime().mutex);
  const bool was_there = runtime().registered.erase(static_cast<std::byte*>(memory)) == 1;
  return was_there ? status : answer(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return enter(__func__);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  if (flags != cudaStreamNonBlocking || priority > 0 || priority < -5)
    return answer(cudaErrorInvalidValue);
  FAKE_CUDA_ENTER;
  const StreamId id = runtime().device->create_stream("fake", StreamPriority::kNormal);
  *stream = handle_of<cudaStream_t>(id);
  const std::scoped_lock lock(runtime().mutex);
  runtime().stream_gpus[id] = current_device();
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
// Does not wait. After a failure the stream stays, with its callbacks, to the end of the program,
// or of the failure (disarm_fake_cuda_fault()).
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const cudaError_t status = enter(__func__);
  const bool stays = runtime().failed != 0;
  {
    const std::scoped_lock lock(runtime().mutex);
    runtime().stream_gpus.erase(id_of_stream(stream));
    if (stays) runtime().streams_left.push_back(id_of_stream(stream));
  }
  if (!stays) runtime().device->destroy_stream(id_of_stream(stream));
  return status;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const cudaError_t status = enter(__func__);
  if (status != cudaSuccess && runtime().failed == 0) return status;
  runtime().device->synchronize(id_of_stream(stream));
  return standing();
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if ((flags & cudaEventBlockingSync) == 0) return answer(cudaErrorInvalidValue);
  FAKE_CUDA_ENTER;
  const EventId id = runtime().device->create_event();
  *event = handle_of<cudaEvent_t>(id);
  const std::scoped_lock lock(runtime().mutex);
  runtime().event_gpus[id] = current_device();
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  runtime().device->destroy_event(id_of_event(event));
  {
    const std::scoped_lock lock(runtime().mutex);
    runtime().event_gpus.erase(id_of_event(event));
  }
  return enter(__func__);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  log_call(FakeCudaCall::Kind::kRecord, stream, event);
  FAKE_CUDA_ENTER;
  if (gpu_of_event(event) != gpu_of_stream(stream)) return answer(cudaErrorInvalidResourceHandle);
  runtime().device->record(id_of_event(event), id_of_stream(stream));
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  FAKE_CUDA_ENTER;
  return runtime().device->is_complete(id_of_event(event)) ? cudaSuccess
                                                           : answer(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  FAKE_CUDA_ENTER;
  runtime().device->synchronize(id_of_event(event));
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* elapsed_ms, cudaEvent_t begin, cudaEvent_t end) {
  FAKE_CUDA_ENTER;
  *elapsed_ms = static_cast<float>(
      static_cast<double>(runtime().device->elapsed_ns(id_of_event(begin), id_of_event(end))) *
      1e-6);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  log_call(FakeCudaCall::Kind::kWait, stream, event);
  FAKE_CUDA_ENTER;
  runtime().device->wait(id_of_stream(stream), id_of_event(event));
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data,
                                  unsigned) {
  log_call(FakeCudaCall::Kind::kCallback, stream);
  const cudaError_t status = enter(__func__);
  if (status != cudaSuccess && (runtime().refuses_callbacks || runtime().failed == 0))
    return status;
  if (runtime().refuses_next_callback.exchange(false)) return answer(cudaErrorMemoryAllocation);
  runtime().device->launch(id_of_stream(stream), [stream, callback, data] {
    const std::scoped_lock one_at_a_time(runtime().callback_mutex);
    callback(stream, static_cast<cudaError_t>(runtime().failed.load()), data);
  });
  return cudaSuccess;
}

}  // extern "C"
