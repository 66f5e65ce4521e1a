#include <sluice/cuda_device.h>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

#include <sluice/units.h>
#include "gpu/cuda/cuda_batch.h"
#include "gpu/cuda/cuda_current_device.h"
#include "gpu/cuda/cuda_error.h"
#include "gpu/cuda/cuda_memory.h"
#include "gpu/cuda/cuda_notifier.h"
#include "gpu/cuda/cuda_streams.h"
#include "gpu/cuda/cuda_wait.h"
#include "gpu/device/device_misuse.h"
#include "gpu/device/host_call_queue.h"
#include "gpu/device/host_stream.h"

namespace sluice {
namespace {

// Memory that cuBLASLt, the kernels' code and the runtime take beside our own.
constexpr std::uint64_t kReserveBytes = 1_GiB;

cudaDeviceProp properties_of(int ordinal) {
  cudaDeviceProp properties{};
  SLUICE_CUDA(cudaGetDeviceProperties(&properties, ordinal));
  return properties;
}

// The memory of a GPU that allocations may take.
std::uint64_t available_bytes(int ordinal) {
  const std::uint64_t free_bytes = cuda_unused_bytes(ordinal);
  return free_bytes - std::min(free_bytes, kReserveBytes);
}

// The argument of the runtime's callback, which deletes it.
struct Callback {
  std::shared_ptr<HostCallQueue> calls;
  std::uint64_t number;
};

class RuntimeCudaDevice final : public CudaDevice {
 public:
  explicit RuntimeCudaDevice(const CudaDeviceOptions& options);
  ~RuntimeCudaDevice() override;

  std::string_view name() const override { return name_; }
  bool has_own_memory() const override { return true; }
  int ordinal() const override { return ordinal_; }
  void* native_stream(StreamId stream) const override { return stream_of(stream).stream; }
  void fail(const Error& failure) noexcept override {
    failure_.set(std::make_exception_ptr(failure));
  }
  bool has_failed() const noexcept override { return failure_.is_set(); }

  std::byte* allocate(std::uint64_t size_bytes, std::string_view purpose) override {
    return memory_.allocate(size_bytes, purpose);
  }
  void free(std::byte* memory) noexcept override;
  std::uint64_t capacity_bytes() const override;
  std::uint64_t free_bytes() const override {
    return std::min(capacity_bytes() - allocated_bytes(), memory_.unused_bytes());
  }
  std::uint64_t allocated_bytes() const override { return memory_.allocated_bytes(); }

  void register_host_memory(std::span<std::byte> memory) override { memory_.register_host(memory); }
  void unregister_host_memory(std::span<std::byte> memory) noexcept override;

  StreamId create_stream(std::string_view, StreamPriority priority) override {
    return streams_.create(priority);
  }
  Stream adopt_stream(void* native) override;
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
  void copy_all(std::span<const CopyPiece> pieces, StreamId stream) override;
  void fill_zero(std::byte* target, std::uint64_t size_bytes, StreamId stream) override;
  void call_host(StreamId stream, std::function<void()> function) override;
  void notify(StreamId stream, std::function<void()> function) override;

 private:
  CudaStream& stream_of(StreamId id) const {
    require_outside_host_function(name_);
    return streams_.at(id);
  }
  cudaEvent_t event_of(EventId id) const;
  // Makes `call`, a call of the runtime, on this GPU. Returns the first failure: the GPU could not
  // be made the current one, or the call failed. The call is made in any case, because resources
  // have to be given back after a failure too.
  template <class Call>
  cudaError_t on_device(const Call& call) const {
    int status = 0;
    const CudaCurrentDevice current(ordinal_, std::nothrow, &status);
    const cudaError_t result = call();
    return status != 0 ? static_cast<cudaError_t>(status) : result;
  }
  void latch(cudaError_t status, const char* expression, int line) const;
  void await(const CudaStream& stream) const;
  void await_all(CudaStream& stream);
  void start(CudaStream& stream, std::function<void()> function);
  void run_refused(CudaStream& stream, std::uint64_t number);

  const int ordinal_;
  const bool takes_all_;  // all free memory
  std::string name_;
  CudaMemory memory_;
  CudaBatch batch_;
  mutable FailureLatch failure_;
  CudaStreams streams_;

  mutable std::mutex events_mutex_;
  // Guarded by events_mutex_.
  std::uint32_t last_event_ = 0;
  std::unordered_map<EventId, cudaEvent_t> events_;

  // Runs host functions that the runtime refuses after a failure.
  FailureLatch never_fails_;
  HostStream last_resort_;
  CudaNotifier notifier_;
};

// Enqueueing never throws, because it happens on threads that could not handle an error. The
// failure is kept for synchronize().
#define SLUICE_CUDA_ENQUEUE(expression)                                                          \
  do {                                                                                           \
    if (const cudaError_t failed = on_device([&] { return expression; }); failed != cudaSuccess) \
      latch(failed, #expression, __LINE__);                                                      \
  } while (false)

RuntimeCudaDevice::RuntimeCudaDevice(const CudaDeviceOptions& options)
    : ordinal_(options.ordinal),
      takes_all_(options.memory_bytes == 0),
      name_(fmt::format("cuda:{} {}", ordinal_, properties_of(ordinal_).name)),
      memory_(ordinal_, name_, takes_all_ ? available_bytes(ordinal_) : options.memory_bytes,
              options.memory_source),
      batch_(memory_),
      streams_(ordinal_, name_, failure_),
      last_resort_("cuda failed", {}, never_fails_),
      notifier_(ordinal_, failure_) {}

RuntimeCudaDevice::~RuntimeCudaDevice() {
  SLUICE_CHECK(streams_.are_none() && events_.empty(), "streams and events go before their device");
}

void RuntimeCudaDevice::latch(cudaError_t status, const char* expression, int line) const {
  (void)cudaGetLastError();  // if the error is not a lasting one, later calls need not see it
  failure_.set(std::make_exception_ptr(cuda_error(status, expression, __FILE__, line)));
}

// Part of the initially free memory has gone to loaded code and communicators.
std::uint64_t RuntimeCudaDevice::capacity_bytes() const {
  if (!takes_all_) return memory_.capacity_bytes();
  return std::min(memory_.capacity_bytes(), memory_.allocated_bytes() + available_bytes(ordinal_));
}

void RuntimeCudaDevice::free(std::byte* memory) noexcept {
  SLUICE_CUDA_ENQUEUE(static_cast<cudaError_t>(memory_.free(memory)));
}

void RuntimeCudaDevice::unregister_host_memory(std::span<std::byte> memory) noexcept {
  if (!memory.empty()) SLUICE_CUDA_ENQUEUE(cudaHostUnregister(memory.data()));
}

// Streams and events.
Stream RuntimeCudaDevice::adopt_stream(void* native) {
  require_outside_host_function(name_);
  return {*this, streams_.adopt(native)};
}

void RuntimeCudaDevice::destroy_stream(StreamId id) noexcept {
  const std::unique_ptr<CudaStream> leaving = streams_.take(id);
  notifier_.drain(leaving->stream);
  await_all(*leaving);
  if (const int status = streams_.give_back(*leaving); status != 0)
    latch(static_cast<cudaError_t>(status), "giving a stream back", __LINE__);
}

// With timing, for elapsed_ns(). A thread that waits for an event sleeps, because spinning would
// take a core from the optimizer.
EventId RuntimeCudaDevice::create_event() {
  const CudaCurrentDevice current(ordinal_);
  cudaEvent_t event = nullptr;
  SLUICE_CUDA(cudaEventCreateWithFlags(&event, cudaEventBlockingSync));
  const std::scoped_lock lock(events_mutex_);
  const EventId id{++last_event_};
  events_.emplace(id, event);
  return id;
}

// The runtime keeps a pending record until the device has finished with it.
void RuntimeCudaDevice::destroy_event(EventId id) noexcept {
  const cudaEvent_t event = event_of(id);
  {
    const std::scoped_lock lock(events_mutex_);
    events_.erase(id);
  }
  SLUICE_CUDA_ENQUEUE(cudaEventDestroy(event));
}

cudaEvent_t RuntimeCudaDevice::event_of(EventId id) const {
  require_outside_host_function(name());
  const std::scoped_lock lock(events_mutex_);
  const auto entry = events_.find(id);
  if (entry == events_.end()) refuse_event(name_, id);
  return entry->second;
}

void RuntimeCudaDevice::record(EventId event, StreamId stream) {
  SLUICE_CUDA_ENQUEUE(cudaEventRecord(event_of(event), stream_of(stream).stream));
}

// An event that was never recorded holds up nothing.
void RuntimeCudaDevice::wait(StreamId stream, EventId event) {
  SLUICE_CUDA_ENQUEUE(cudaStreamWaitEvent(stream_of(stream).stream, event_of(event), 0));
}

bool RuntimeCudaDevice::is_complete(EventId event) const {
  const cudaError_t status =
      on_device([native = event_of(event)] { return cudaEventQuery(native); });
  if (status == cudaErrorNotReady) {
    (void)cudaGetLastError();  // otherwise the next launch on this thread would look failed
    return false;
  }
  if (status != cudaSuccess) latch(status, "cudaEventQuery", __LINE__);
  return true;
}

void RuntimeCudaDevice::await(const CudaStream& stream) const {
  if (const int status = wait_for_cuda_stream(ordinal_, stream.stream, stream.reached); status != 0)
    latch(static_cast<cudaError_t>(status), "waiting for a stream", __LINE__);
}

void RuntimeCudaDevice::await_all(CudaStream& stream) {
  await(stream);
  // After a failure the event tells nothing, and the runtime may call back late.
  stream.calls->run_all();
  std::unique_lock lock(stream.mutex);
  stream.changed.wait(lock, [&stream] { return stream.refused_calls == 0; });
}

void RuntimeCudaDevice::synchronize(EventId event) {
  if (const int status = wait_for_cuda_event(ordinal_, event_of(event)); status != 0)
    latch(static_cast<cudaError_t>(status), "waiting for an event", __LINE__);
  failure_.rethrow_if_set();
}

void RuntimeCudaDevice::synchronize(StreamId id) {
  await(stream_of(id));
  failure_.rethrow_if_set();
}

std::int64_t RuntimeCudaDevice::elapsed_ns(EventId begin, EventId end) const {
  const CudaCurrentDevice current(ordinal_);
  float elapsed_ms = 0;
  SLUICE_CUDA(cudaEventElapsedTime(&elapsed_ms, event_of(begin), event_of(end)));
  return static_cast<std::int64_t>(static_cast<double>(elapsed_ms) * 1e6);
}

void RuntimeCudaDevice::copy(std::byte* target, const std::byte* source, std::uint64_t size_bytes,
                             StreamId id) {
  CudaStream& stream = stream_of(id);
  if (size_bytes == 0 || failure_.is_set()) return;
  require_argument(target != nullptr && source != nullptr, "copy", "target or source is null");
  bool is_on_device = memory_.contains(target) || memory_.contains(source);
  for (const std::byte* const end : {static_cast<const std::byte*>(target), source}) {
    if (is_on_device) break;
    // Without an answer, the copy must not be taken for one on the host.
    SLUICE_CUDA_ENQUEUE(cudaError_t(memory_.ask_foreign(end, is_on_device)));
    if (failure_.is_set()) return;
  }
  if (!is_on_device) {
    // cudaMemcpyAsync would block the caller until it is done.
    return start(stream, [target, source, size_bytes] { std::memcpy(target, source, size_bytes); });
  }
  // CUDA sees by the addresses where both ends lie, also those of GPU memory that others allocated.
  SLUICE_CUDA_ENQUEUE(
      cudaMemcpyAsync(target, source, size_bytes, cudaMemcpyDefault, stream.stream));
}

void RuntimeCudaDevice::copy_all(std::span<const CopyPiece> pieces, StreamId id) {
  void* const stream = stream_of(id).stream;
  // The driver takes no batches on the default stream, which an application may have adopted.
  const bool is_default = stream == nullptr || stream == cudaStreamLegacy;
  if (is_default || !batch_.takes(pieces)) return Device::copy_all(pieces, id);
  if (!failure_.is_set()) SLUICE_CUDA_ENQUEUE(cudaError_t(batch_.copy(pieces, stream, ordinal_)));
}

void RuntimeCudaDevice::fill_zero(std::byte* target, std::uint64_t size_bytes, StreamId id) {
  CudaStream& stream = stream_of(id);
  if (size_bytes == 0 || failure_.is_set()) return;
  require_argument(target != nullptr, "fill_zero", "the target is null");
  bool is_on_device = memory_.contains(target);
  if (!is_on_device) {
    // Without an answer, memory of others must not be taken for the host's.
    SLUICE_CUDA_ENQUEUE(cudaError_t(memory_.ask_foreign(target, is_on_device)));
    if (failure_.is_set()) return;
  }
  if (!is_on_device)
    return start(stream, [target, size_bytes] { std::memset(target, 0, size_bytes); });
  SLUICE_CUDA_ENQUEUE(cudaMemsetAsync(target, 0, size_bytes, stream.stream));
}

void RuntimeCudaDevice::call_host(StreamId id, std::function<void()> function) {
  require_argument(function != nullptr, "call_host", "the function is empty");
  start(stream_of(id), std::move(function));
}

void RuntimeCudaDevice::notify(StreamId id, std::function<void()> function) {
  require_argument(function != nullptr, "notify", "the function is empty");
  notifier_.add(stream_of(id).stream, std::move(function));
}

void CUDART_CB on_reached(cudaStream_t, cudaError_t status, void* data) {
  const std::unique_ptr<Callback> callback(static_cast<Callback*>(data));
  const std::exception_ptr failure =
      status == cudaSuccess
          ? nullptr
          : std::make_exception_ptr(
                cuda_error(static_cast<int>(status), "work on a stream", __FILE__, __LINE__));
  callback->calls->run_up_to(callback->number, failure);
}

// Uses cudaStreamAddCallback and not cudaLaunchHostFunc: after an error of the device the latter
// does not call its functions, and a thread that waits for one would wait forever.
void RuntimeCudaDevice::start(CudaStream& stream, std::function<void()> function) {
  const CudaCurrentDevice current(ordinal_, std::nothrow);
  const std::scoped_lock in_order(stream.starting);
  const std::uint64_t number = stream.calls->add(std::move(function));
  auto callback = std::make_unique<Callback>(Callback{stream.calls, number});
  const cudaError_t status = cudaStreamAddCallback(stream.stream, on_reached, callback.get(), 0);
  if (status == cudaSuccess) {
    (void)callback.release();  // the runtime owns it now
    return;
  }
  latch(status, "cudaStreamAddCallback", __LINE__);
  {
    const std::scoped_lock lock(stream.mutex);
    ++stream.refused_calls;
  }
  last_resort_.enqueue(LaunchTask{[this, &stream, number] { run_refused(stream, number); }});
}

// Runs after earlier work while the GPU still works; otherwise the runtime returns at once.
void RuntimeCudaDevice::run_refused(CudaStream& stream, std::uint64_t number) {
  (void)on_device([&] { return cudaStreamSynchronize(stream.stream); });
  stream.calls->run_up_to(number);
  const std::scoped_lock lock(stream.mutex);
  --stream.refused_calls;
  stream.changed.notify_all();
}

}  // namespace

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
  return std::make_unique<RuntimeCudaDevice>(options);
}

}  // namespace sluice
