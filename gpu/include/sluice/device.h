// The interface to the accelerator. The interface provides memory with a budget, asynchronous
// streams, events that order the streams, and copies. The host device implements this interface
// with host memory and worker threads, so that the engine can run and be tested without a GPU. The
// CUDA version has the same contract.
//
// Thread rule: every function may be called from any thread. Work on one stream runs in the order
// in which it was enqueued. Streams run concurrently unless an event orders them. Host functions
// run on a thread of the device. The functions must be short and must not call the device.
// Invariants: a call with an event uses the event's latest record at the time of the call. CUDA has
// the same rule. So a new record of the event does not disturb an earlier wait. An event that was
// never recorded counts as complete.
// Failure: a call that is not noexcept fails with kInvalidArgument if the function is empty, the
// range is null, or the stream or the event does not exist. A noexcept call aborts the process if
// its memory, stream or event does not exist.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <utility>

#include <sluice/export.h>

namespace sluice {

enum class StreamId : std::uint32_t {};
enum class EventId : std::uint32_t {};

// If kernels of two streams are ready, the stream of higher priority goes first. Priorities are a
// hint. Priorities do not affect copies. Priorities have no effect on a device that runs all
// streams at the same time.
enum class StreamPriority : std::uint8_t { kNormal, kHigh };

// The struct describes one of the copies that Device::copy_all() makes.
struct CopyPiece {
  std::byte* target = nullptr;
  const std::byte* source = nullptr;
  std::uint64_t size_bytes = 0;
};

class SLUICE_EXPORT Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  virtual std::string_view name() const = 0;
  // Returns whether the device has its own memory and processors. Data on such a device takes no
  // host memory. Computation on such a device does not use the host's processors.
  virtual bool has_own_memory() const = 0;

  // Allocates zero-filled device memory, aligned at least to 4 KiB. Returns nullptr for 0 bytes;
  // free() accepts nullptr, too. In messages, `purpose` names the memory.
  // Fails with kOutOfMemory if that much memory is not free. The message names the request, the
  // memory in use and the capacity.
  virtual std::byte* allocate(std::uint64_t size_bytes, std::string_view purpose) = 0;
  virtual void free(std::byte* memory) noexcept = 0;
  virtual std::uint64_t capacity_bytes() const = 0;
  virtual std::uint64_t allocated_bytes() const = 0;
  // Returns the number of bytes that allocate() can still provide. On a GPU, the result is at most
  // the memory that other processes have left free.
  virtual std::uint64_t free_bytes() const { return capacity_bytes() - allocated_bytes(); }

  // Prepares host memory for asynchronous copies. CUDA page-locks the memory. The host side of each
  // copy has to lie within one registered span. The caller still owns the memory, and unregisters
  // the same span before freeing the memory. An empty span is ignored.
  // Requires: the span begins at a page, and nothing else uses the rest of the span's last page.
  virtual void register_host_memory(std::span<std::byte> memory) = 0;
  virtual void unregister_host_memory(std::span<std::byte> memory) noexcept = 0;

  // `name` appears in traces and thread names.
  virtual StreamId create_stream(std::string_view name, StreamPriority priority) = 0;
  // The call first waits for the stream's work.
  virtual void destroy_stream(StreamId stream) noexcept = 0;
  virtual EventId create_event() = 0;
  virtual void destroy_event(EventId event) noexcept = 0;

  // Enqueues a record of `event` after the work that is already on `stream`.
  virtual void record(EventId event, StreamId stream) = 0;
  // The call delays all work that is enqueued on `stream` later. This work starts only when the
  // latest record of `event` has completed.
  virtual void wait(StreamId stream, EventId event) = 0;
  virtual bool is_complete(EventId event) const = 0;
  // The call blocks the calling thread until the event or the stream's work has completed. The call
  // rethrows the first failure of work on any stream.
  virtual void synchronize(EventId event) = 0;
  virtual void synchronize(StreamId stream) = 0;
  // Returns the number of nanoseconds between two completed records.
  // Requires: both events have completed.
  virtual std::int64_t elapsed_ns(EventId begin, EventId end) const = 0;

  // `target` and `source` may each be host or device memory. The two regions do not overlap. The
  // copy is asynchronous. Before reusing the memory, the caller records an event after the copy and
  // waits for the event.
  virtual void copy(std::byte* target, const std::byte* source, std::uint64_t size_bytes,
                    StreamId stream) = 0;
  // The call copies every piece as copy() does. The order of the pieces is not defined. Each device
  // makes as few calls of its runtime as possible. No piece may read or write bytes that another
  // piece writes.
  virtual void copy_all(std::span<const CopyPiece> pieces, StreamId stream) {
    for (const CopyPiece& piece : pieces)
      copy(piece.target, piece.source, piece.size_bytes, stream);
  }
  virtual void fill_zero(std::byte* target, std::uint64_t size_bytes, StreamId stream) = 0;
  // A thread of the device runs `function` after earlier work on `stream`. Later work on `stream`
  // waits for `function`. Functions of different streams may run one after another. So no function
  // may wait for another function. The functions of one stream run in the order of the calls, even
  // after a failure.
  // An exception from `function` is a failure of the stream's work. After a failure on any stream,
  // later copies, fills and computation are skipped. The device may also skip copies, fills and
  // computation that were already enqueued. Events still complete, and host functions still run. So
  // no thread waits forever for an event or for a host function. Before using results of earlier
  // work, call synchronize(), which rethrows the failure.
  virtual void call_host(StreamId stream, std::function<void()> function) = 0;
  // Like call_host(), notify() calls `function` when earlier work on `stream` has ended. Later work
  // on `stream` waits for the function of call_host(), but not for the function of notify(). So a
  // GPU continues with later work at once, and `function` does not delay copies or computation. If
  // the earlier work has ended already, `function` may run on the calling thread, before the call
  // returns. The functions given to notify() for one stream run in the order of the calls. These
  // functions may run before or after functions given to call_host(). The call destroy_stream()
  // waits for the functions given to notify(), but synchronize() does not wait for them.
  virtual void notify(StreamId stream, std::function<void()> function) {
    call_host(stream, std::move(function));
  }

  // Returns a number of bytes. If an operation has at most this many bytes, the operation is faster
  // on the calling thread, because no other thread has to be woken. If the result is 0, no
  // operation is faster on the calling thread.
  virtual std::uint64_t at_once_bytes_max() const { return 0; }
};

// Device memory with one owner. `device` must outlive the buffer.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(Device& device, std::uint64_t size_bytes, std::string_view purpose)
      : device_(&device), data_(device.allocate(size_bytes, purpose)), size_bytes_(size_bytes) {}
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(size_bytes_, other.size_bytes_);
    return *this;
  }
  ~DeviceBuffer() {
    if (data_ != nullptr) device_->free(data_);
  }

  std::byte* data() const { return data_; }
  std::uint64_t size_bytes() const { return size_bytes_; }

 private:
  Device* device_ = nullptr;
  std::byte* data_ = nullptr;
  std::uint64_t size_bytes_ = 0;
};

// A stream with one owner. `device` must outlive the stream.
class Stream {
 public:
  Stream() = default;
  Stream(Device& device, std::string_view name, StreamPriority priority = StreamPriority::kNormal)
      : device_(&device), id_(device.create_stream(name, priority)) {}
  // The new object owns `id`, a stream of `device` that has no owner yet.
  Stream(Device& device, StreamId id) : device_(&device), id_(id) {}
  Stream(Stream&& other) noexcept { *this = std::move(other); }
  Stream& operator=(Stream&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(id_, other.id_);
    return *this;
  }
  ~Stream() {
    if (device_ != nullptr) device_->destroy_stream(id_);
  }

  StreamId id() const { return id_; }
  const Device* device() const { return device_; }  // null for an empty stream

 private:
  Device* device_ = nullptr;
  StreamId id_{};
};

// An event with one owner. `device` must outlive the event.
class Event {
 public:
  Event() = default;
  explicit Event(Device& device) : device_(&device), id_(device.create_event()) {}
  Event(Event&& other) noexcept { *this = std::move(other); }
  Event& operator=(Event&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(id_, other.id_);
    return *this;
  }
  ~Event() {
    if (device_ != nullptr) device_->destroy_event(id_);
  }

  EventId id() const { return id_; }

 private:
  Device* device_ = nullptr;
  EventId id_{};
};

}  // namespace sluice
