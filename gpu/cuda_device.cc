#include "gpu/cuda_device.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

#include "base/units.h"
#include "gpu/cuda_current_device.h"
#include "gpu/cuda_error.h"
#include "gpu/cuda_memory.h"
#include "gpu/host_stream.h"

namespace sluice {
namespace {

// What cuBLASLt, the kernels' code and the runtime take beside our own memory.
constexpr std::uint64_t kReserveBytes = 1_GiB;

cudaDeviceProp properties_of(int ordinal) {
  cudaDeviceProp properties{};
  SLUICE_CUDA(cudaGetDeviceProperties(&properties, ordinal));
  return properties;
}

// A stream and what its owner needs to wait for it.
struct CudaStream {
  cudaStream_t stream = nullptr;
  cudaEvent_t reached = nullptr;  // recorded by synchronize()

  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t host_calls = 0;  // functions that have not returned yet; guarded by mutex
};

class RuntimeCudaDevice;

// A function on its way to a thread of the CUDA runtime. Deleted there.
struct HostCall {
  RuntimeCudaDevice* device;
  CudaStream* stream;
  std::function<void()> function;
};

class RuntimeCudaDevice final : public CudaDevice {
 public:
  explicit RuntimeCudaDevice(const CudaDeviceOptions& options);
  ~RuntimeCudaDevice() override;

  std::string_view name() const override { return name_; }
  bool has_own_memory() const override { return true; }
  int ordinal() const override { return ordinal_; }
  void* native_stream(StreamId stream) const override { return stream_of(stream).stream; }

  std::byte* allocate(std::uint64_t size_bytes, std::string_view purpose) override {
    return memory_.allocate(size_bytes, purpose);
  }
  void free(std::byte* memory) noexcept override;
  std::uint64_t capacity_bytes() const override { return memory_.capacity_bytes(); }
  std::uint64_t allocated_bytes() const override { return memory_.allocated_bytes(); }

  void register_host_memory(std::span<std::byte> memory) override { memory_.register_host(memory); }
  void unregister_host_memory(std::span<std::byte> memory) noexcept override;

  StreamId create_stream(std::string_view name, StreamPriority priority) override;
  void destroy_stream(StreamId stream) noexcept override;
  EventId create_event() override;
  void destroy_event(EventId event) noexcept override;

  void record(EventId event, StreamId stream) override;
  void wait(StreamId stream, EventId event) override;
  bool is_complete(EventId event) const override;
  void synchronize(EventId event) override;
  void synchronize(StreamId stream) override;
  std::int64_t elapsed_ns(EventId begin, EventId end) const override;

  void copy(std::byte* target, const std::byte* source, std::uint64_t size_bytes,
            StreamId stream) override;
  void fill_zero(std::byte* target, std::uint64_t size_bytes, StreamId stream) override;
  void call_host(StreamId stream, std::function<void()> function) override;

  void finish(std::unique_ptr<HostCall> call, cudaError_t status);

 private:
  CudaStream& stream_of(StreamId id) const;
  cudaEvent_t event_of(EventId id) const;
  void latch(cudaError_t status, const char* expression, int line) const;
  void await(cudaEvent_t event) const;
  void await_all(CudaStream& stream);
  void start(CudaStream& stream, std::function<void()> function);

  const int ordinal_;
  std::string name_;
  int high_priority_ = 0;  // numerically the least
  CudaMemory memory_;
  mutable FailureLatch failure_;

  mutable std::mutex objects_mutex_;
  // Guarded by objects_mutex_; what the pointers refer to is not.
  std::uint32_t last_id_ = 0;
  std::unordered_map<EventId, cudaEvent_t> events_;
  std::unordered_map<StreamId, std::unique_ptr<CudaStream>> streams_;

  // Runs host functions that the runtime would not take any more after a failure.
  HostStream last_resort_;
};

// Enqueueing never throws: it happens on threads that could do nothing about it. The failure is
// kept for synchronize().
#define SLUICE_CUDA_ENQUEUE(expression)                                 \
  do {                                                                  \
    if (const cudaError_t status = (expression); status != cudaSuccess) \
      latch(status, #expression, __LINE__);                             \
  } while (false)

RuntimeCudaDevice::RuntimeCudaDevice(const CudaDeviceOptions& options)
    : ordinal_(options.ordinal),
      name_(fmt::format("cuda:{} {}", ordinal_, properties_of(ordinal_).name)),
      memory_(ordinal_, name_, options.memory_bytes, options.memory_source),
      last_resort_("cuda failed", 0, failure_) {
  const CudaCurrentDevice current(ordinal_);
  int least = 0;
  SLUICE_CUDA(cudaDeviceGetStreamPriorityRange(&least, &high_priority_));
}

RuntimeCudaDevice::~RuntimeCudaDevice() {
  SLUICE_CHECK(streams_.empty() && events_.empty(), "streams and events go before their device");
}

void RuntimeCudaDevice::latch(cudaError_t status, const char* expression, int line) const {
  (void)cudaGetLastError();  // where it is no lasting one, later calls need not hear of it
  failure_.set(std::make_exception_ptr(cuda_error(status, expression, __FILE__, line)));
}

void RuntimeCudaDevice::free(std::byte* memory) noexcept {
  SLUICE_CUDA_ENQUEUE(static_cast<cudaError_t>(memory_.free(memory)));
}

void RuntimeCudaDevice::unregister_host_memory(std::span<std::byte> memory) noexcept {
  if (!memory.empty()) SLUICE_CUDA_ENQUEUE(cudaHostUnregister(memory.data()));
}

// Streams and events.

StreamId RuntimeCudaDevice::create_stream(std::string_view, StreamPriority priority) {
  const CudaCurrentDevice current(ordinal_);
  auto stream = std::make_unique<CudaStream>();
  SLUICE_CUDA(cudaStreamCreateWithPriority(&stream->stream, cudaStreamNonBlocking,
                                           priority == StreamPriority::kHigh ? high_priority_ : 0));
  if (const cudaError_t status = cudaEventCreateWithFlags(
          &stream->reached, cudaEventBlockingSync | cudaEventDisableTiming);
      status != cudaSuccess) {
    (void)cudaStreamDestroy(stream->stream);
    throw cuda_error(static_cast<int>(status), "cudaEventCreateWithFlags", __FILE__, __LINE__);
  }
  const std::scoped_lock lock(objects_mutex_);
  const StreamId id{++last_id_};
  streams_.emplace(id, std::move(stream));
  return id;
}

void RuntimeCudaDevice::destroy_stream(StreamId id) noexcept {
  std::unique_ptr<CudaStream> leaving;
  {
    const std::scoped_lock lock(objects_mutex_);
    const auto entry = streams_.find(id);
    SLUICE_CHECK(entry != streams_.end(), "the stream exists");
    leaving = std::move(entry->second);
    streams_.erase(entry);
  }
  await_all(*leaving);
  SLUICE_CUDA_ENQUEUE(cudaEventDestroy(leaving->reached));
  SLUICE_CUDA_ENQUEUE(cudaStreamDestroy(leaving->stream));
}

// With timing, for elapsed_ns(); a thread that waits for one sleeps, for spinning would take a core
// from the optimizer.
EventId RuntimeCudaDevice::create_event() {
  const CudaCurrentDevice current(ordinal_);
  cudaEvent_t event = nullptr;
  SLUICE_CUDA(cudaEventCreateWithFlags(&event, cudaEventBlockingSync));
  const std::scoped_lock lock(objects_mutex_);
  const EventId id{++last_id_};
  events_.emplace(id, event);
  return id;
}

// The runtime keeps a pending record until the device is through with it.
void RuntimeCudaDevice::destroy_event(EventId id) noexcept {
  const cudaEvent_t event = event_of(id);
  {
    const std::scoped_lock lock(objects_mutex_);
    events_.erase(id);
  }
  SLUICE_CUDA_ENQUEUE(cudaEventDestroy(event));
}

CudaStream& RuntimeCudaDevice::stream_of(StreamId id) const {
  SLUICE_CHECK(!is_in_host_function(), "a function given to call_host does not call the device");
  const std::scoped_lock lock(objects_mutex_);
  const auto entry = streams_.find(id);
  SLUICE_CHECK(entry != streams_.end(), "the stream exists");
  return *entry->second;
}

cudaEvent_t RuntimeCudaDevice::event_of(EventId id) const {
  SLUICE_CHECK(!is_in_host_function(), "a function given to call_host does not call the device");
  const std::scoped_lock lock(objects_mutex_);
  const auto entry = events_.find(id);
  SLUICE_CHECK(entry != events_.end(), "the event exists");
  return entry->second;
}

void RuntimeCudaDevice::record(EventId event, StreamId stream) {
  SLUICE_CUDA_ENQUEUE(cudaEventRecord(event_of(event), stream_of(stream).stream));
}

// Of an event that was never recorded nothing is waited for.
void RuntimeCudaDevice::wait(StreamId stream, EventId event) {
  SLUICE_CUDA_ENQUEUE(cudaStreamWaitEvent(stream_of(stream).stream, event_of(event), 0));
}

bool RuntimeCudaDevice::is_complete(EventId event) const {
  const cudaError_t status = cudaEventQuery(event_of(event));
  if (status == cudaErrorNotReady) {
    (void)cudaGetLastError();  // else the next launch on this thread would look failed
    return false;
  }
  if (status != cudaSuccess) latch(status, "cudaEventQuery", __LINE__);
  return true;
}

void RuntimeCudaDevice::await(cudaEvent_t event) const {
  SLUICE_CUDA_ENQUEUE(cudaEventSynchronize(event));
}

void RuntimeCudaDevice::await_all(CudaStream& stream) {
  SLUICE_CUDA_ENQUEUE(cudaEventRecord(stream.reached, stream.stream));
  await(stream.reached);
  // After a failure the event says nothing; the functions still come, one way or the other.
  std::unique_lock lock(stream.mutex);
  stream.changed.wait(lock, [&stream] { return stream.host_calls == 0; });
}

void RuntimeCudaDevice::synchronize(EventId event) {
  await(event_of(event));
  failure_.rethrow_if_set();
}

void RuntimeCudaDevice::synchronize(StreamId id) {
  CudaStream& stream = stream_of(id);
  SLUICE_CUDA_ENQUEUE(cudaEventRecord(stream.reached, stream.stream));
  await(stream.reached);
  failure_.rethrow_if_set();
}

std::int64_t RuntimeCudaDevice::elapsed_ns(EventId begin, EventId end) const {
  float elapsed_ms = 0;
  SLUICE_CUDA(cudaEventElapsedTime(&elapsed_ms, event_of(begin), event_of(end)));
  return static_cast<std::int64_t>(static_cast<double>(elapsed_ms) * 1e6);
}

// Work.

void RuntimeCudaDevice::copy(std::byte* target, const std::byte* source, std::uint64_t size_bytes,
                             StreamId id) {
  CudaStream& stream = stream_of(id);
  if (size_bytes == 0 || failure_.is_set()) return;
  SLUICE_CHECK(target != nullptr && source != nullptr, "a copy has a target and a source");
  const bool to_device = memory_.contains(target);
  const bool from_device = memory_.contains(source);
  if (!to_device && !from_device) {
    // cudaMemcpyAsync would block the caller until it is done.
    return start(stream, [target, source, size_bytes] { std::memcpy(target, source, size_bytes); });
  }
  const cudaMemcpyKind kind = !from_device ? cudaMemcpyHostToDevice
                              : to_device  ? cudaMemcpyDeviceToDevice
                                           : cudaMemcpyDeviceToHost;
  SLUICE_CUDA_ENQUEUE(cudaMemcpyAsync(target, source, size_bytes, kind, stream.stream));
}

void RuntimeCudaDevice::fill_zero(std::byte* target, std::uint64_t size_bytes, StreamId id) {
  CudaStream& stream = stream_of(id);
  if (size_bytes == 0 || failure_.is_set()) return;
  SLUICE_CHECK(target != nullptr, "a fill has a target");
  if (!memory_.contains(target))
    return start(stream, [target, size_bytes] { std::memset(target, 0, size_bytes); });
  SLUICE_CUDA_ENQUEUE(cudaMemsetAsync(target, 0, size_bytes, stream.stream));
}

void RuntimeCudaDevice::call_host(StreamId id, std::function<void()> function) {
  SLUICE_CHECK(function != nullptr, "call_host has a function");
  start(stream_of(id), std::move(function));
}

void CUDART_CB on_reached(cudaStream_t, cudaError_t status, void* data) {
  std::unique_ptr<HostCall> call(static_cast<HostCall*>(data));
  RuntimeCudaDevice* const device = call->device;
  device->finish(std::move(call), status);
}

// cudaStreamAddCallback and not cudaLaunchHostFunc: after an error of the device the latter's
// functions are not called, and whoever waits for one would wait for ever.
void RuntimeCudaDevice::start(CudaStream& stream, std::function<void()> function) {
  {
    const std::scoped_lock lock(stream.mutex);
    ++stream.host_calls;
  }
  auto call = std::make_unique<HostCall>(HostCall{this, &stream, std::move(function)});
  const cudaError_t status = cudaStreamAddCallback(stream.stream, on_reached, call.get(), 0);
  if (status == cudaSuccess) {
    (void)call.release();  // it is the runtime's now
    return;
  }
  latch(status, "cudaStreamAddCallback", __LINE__);
  last_resort_.enqueue(CallHostTask{[this, shared = std::shared_ptr<HostCall>(std::move(call))] {
    finish(std::make_unique<HostCall>(std::move(*shared)), cudaSuccess);
  }});
}

// Whoever waits for the stream may free it, and the device, as soon as host_calls is 0.
void RuntimeCudaDevice::finish(std::unique_ptr<HostCall> call, cudaError_t status) {
  if (status != cudaSuccess)
    failure_.set(std::make_exception_ptr(
        cuda_error(static_cast<int>(status), "work on a stream", __FILE__, __LINE__)));
  run_host_function(call->function, failure_);
  CudaStream& stream = *call->stream;
  call.reset();  // the captures go before anyone hears of the completion
  const std::scoped_lock lock(stream.mutex);
  --stream.host_calls;
  stream.changed.notify_all();
}

}  // namespace

int cuda_device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  (void)cudaGetLastError();
  return 0;
}

std::string why_no_cuda_device(int ordinal) {
  int count = 0;
  if (const cudaError_t status = cudaGetDeviceCount(&count); status != cudaSuccess) {
    (void)cudaGetLastError();
    return fmt::format("no usable GPU: {}", cudaGetErrorString(status));
  }
  if (ordinal >= count)
    return fmt::format("there is no GPU {}: the driver lists {}", ordinal, count);
  return "";
}

std::string describe_cuda_device(int ordinal) {
  const cudaDeviceProp properties = properties_of(ordinal);
  return fmt::format("{}, compute capability {}.{}, {}", properties.name, properties.major,
                     properties.minor, format_bytes(properties.totalGlobalMem));
}

std::unique_ptr<CudaDevice> make_cuda_device(const CudaDeviceOptions& options) {
  if (const std::string why = why_no_cuda_device(options.ordinal); !why.empty())
    throw Error(ErrorCode::kUnsupported, why);
  const CudaCurrentDevice current(options.ordinal);
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  SLUICE_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  if (options.memory_bytes > total_bytes) {
    throw Error(ErrorCode::kOutOfMemory,
                fmt::format("memory.device is {}, but GPU {} has {}; lower it",
                            format_bytes(options.memory_bytes), options.ordinal,
                            format_bytes(total_bytes)));
  }
  const std::uint64_t available = free_bytes - std::min<std::uint64_t>(free_bytes, kReserveBytes);
  CudaDeviceOptions checked = options;
  if (checked.memory_bytes == 0) checked.memory_bytes = available;
  return std::make_unique<RuntimeCudaDevice>(checked);
}

}  // namespace sluice
