#include <sluice/host_device.h>

#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
#include "base/aligned_buffer.h"
#include "gpu/device/device_misuse.h"
#include "gpu/device/host_event.h"
#include "gpu/device/host_stream.h"
#include "gpu/device/memory_ledger.h"

namespace sluice {
namespace {

constexpr std::uint64_t kCopyRateMin = 1'000'000;  // below, sleeps of minutes look like a hang

bool is_disjoint(const std::byte* a, const std::byte* b, std::uint64_t size_bytes) {
  const auto begin_a = reinterpret_cast<std::uintptr_t>(a);
  const auto begin_b = reinterpret_cast<std::uintptr_t>(b);
  return begin_a < begin_b ? begin_b - begin_a >= size_bytes : begin_a - begin_b >= size_bytes;
}

class ThreadedHostDevice final : public HostDevice {
 public:
  explicit ThreadedHostDevice(const HostDeviceOptions& options)
      : stream_options_{.copy_bytes_per_second = options.copy_bytes_per_second,
                        .at_once_bytes_max = options.at_once_bytes_max},
        has_own_memory_(options.has_own_memory),
        ledger_(options.memory_bytes) {}

  std::string_view name() const override { return "host"; }
  bool has_own_memory() const override { return has_own_memory_; }
  std::uint64_t at_once_bytes_max() const override { return stream_options_.at_once_bytes_max; }

  std::byte* allocate(std::uint64_t size_bytes, std::string_view purpose) override;
  void free(std::byte* memory) noexcept override;
  std::uint64_t capacity_bytes() const override;
  std::uint64_t allocated_bytes() const override;

  void register_host_memory(std::span<std::byte> memory) override;
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
  void notify(StreamId stream, std::function<void()> function) override;
  void launch(StreamId stream, std::function<void()> work) override;
  void occupy(StreamId stream, std::uint64_t duration_ns) override;

 private:
  HostStream& stream_of(StreamId id) const;
  HostEvent& event_of(EventId id) const;
  std::int64_t completed_ns(EventId id) const;

  const HostStream::Options stream_options_;
  const bool has_own_memory_;
  FailureLatch failure_;

  mutable std::mutex memory_mutex_;
  // Guarded by memory_mutex_.
  MemoryLedger ledger_;
  std::unordered_map<const std::byte*, AlignedBuffer> buffers_;
  std::unordered_map<const std::byte*, std::uint64_t> registered_bytes_;

  mutable std::mutex objects_mutex_;
  // Guarded by objects_mutex_, except the objects that the pointers refer to. Ids count from 1, so
  // that an unset id is refused. The streams come last: they stop before the memory is freed.
  std::uint32_t last_id_ = 0;
  std::unordered_map<EventId, std::unique_ptr<HostEvent>> events_;
  std::unordered_map<StreamId, std::unique_ptr<HostStream>> streams_;
};

std::byte* ThreadedHostDevice::allocate(std::uint64_t size_bytes, std::string_view purpose) {
  const std::scoped_lock lock(memory_mutex_);
  ledger_.check_fits(size_bytes, purpose);
  if (size_bytes == 0) return nullptr;
  AlignedBuffer buffer(size_bytes, purpose);
  std::byte* const memory = buffer.data();
  ledger_.add(memory, size_bytes, purpose);
  buffers_.emplace(memory, std::move(buffer));
  return memory;
}

void ThreadedHostDevice::free(std::byte* memory) noexcept {
  if (memory == nullptr) return;
  const std::scoped_lock lock(memory_mutex_);
  ledger_.remove(memory);
  buffers_.erase(memory);
}

std::uint64_t ThreadedHostDevice::capacity_bytes() const {
  const std::scoped_lock lock(memory_mutex_);
  return ledger_.capacity_bytes();
}

std::uint64_t ThreadedHostDevice::allocated_bytes() const {
  const std::scoped_lock lock(memory_mutex_);
  return ledger_.taken_bytes();
}

// Copies need no preparation here; this checks the contract that CUDA enforces.
void ThreadedHostDevice::register_host_memory(std::span<std::byte> memory) {
  if (memory.empty()) return;
  const std::scoped_lock lock(memory_mutex_);
  const bool is_new = registered_bytes_.emplace(memory.data(), memory.size()).second;
  require_argument(is_new, "register_host_memory",
                   "memory at this address is registered already; unregister it first");
}

void ThreadedHostDevice::unregister_host_memory(std::span<std::byte> memory) noexcept {
  if (memory.empty()) return;
  const std::scoped_lock lock(memory_mutex_);
  const auto entry = registered_bytes_.find(memory.data());
  SLUICE_CHECK(entry != registered_bytes_.end() && entry->second == memory.size(),
               "the same span was registered before");
  registered_bytes_.erase(entry);
}

StreamId ThreadedHostDevice::create_stream(std::string_view name, StreamPriority) {
  auto stream = std::make_unique<HostStream>(std::string(name), stream_options_, failure_);
  const std::scoped_lock lock(objects_mutex_);
  const StreamId id{++last_id_};
  streams_.emplace(id, std::move(stream));
  return id;
}

void ThreadedHostDevice::destroy_stream(StreamId stream) noexcept {
  std::unique_ptr<HostStream> leaving;  // joins after the lock is released: its work may take long
  const std::scoped_lock lock(objects_mutex_);
  const auto entry = streams_.find(stream);
  SLUICE_CHECK(entry != streams_.end(), "the stream exists");
  leaving = std::move(entry->second);
  streams_.erase(entry);
}

EventId ThreadedHostDevice::create_event() {
  auto event = std::make_unique<HostEvent>();
  const std::scoped_lock lock(objects_mutex_);
  const EventId id{++last_id_};
  events_.emplace(id, std::move(event));
  return id;
}

void ThreadedHostDevice::destroy_event(EventId event) noexcept {
  const std::scoped_lock lock(objects_mutex_);
  SLUICE_CHECK(events_.erase(event) == 1, "the event exists");
}

HostStream& ThreadedHostDevice::stream_of(StreamId id) const {
  require_outside_host_function(name());
  const std::scoped_lock lock(objects_mutex_);
  const auto entry = streams_.find(id);
  if (entry == streams_.end()) refuse_stream(name(), id);
  return *entry->second;
}

HostEvent& ThreadedHostDevice::event_of(EventId id) const {
  require_outside_host_function(name());
  const std::scoped_lock lock(objects_mutex_);
  const auto entry = events_.find(id);
  if (entry == events_.end()) refuse_event(name(), id);
  return *entry->second;
}

void ThreadedHostDevice::record(EventId event, StreamId stream) {
  HostStream& target = stream_of(stream);
  target.enqueue(RecordTask{event_of(event).begin_record()});
}

void ThreadedHostDevice::wait(StreamId stream, EventId event) {
  HostStream& target = stream_of(stream);
  std::shared_ptr<Ticket> ticket = event_of(event).latest();
  if (ticket == nullptr || ticket->is_complete()) return;
  target.enqueue(WaitTask{std::move(ticket)});
}

bool ThreadedHostDevice::is_complete(EventId event) const {
  const std::shared_ptr<Ticket> ticket = event_of(event).latest();
  return ticket == nullptr || ticket->is_complete();
}

void ThreadedHostDevice::synchronize(EventId event) {
  if (const std::shared_ptr<Ticket> ticket = event_of(event).latest()) ticket->await();
  failure_.rethrow_if_set();
}

void ThreadedHostDevice::synchronize(StreamId stream) {
  stream_of(stream).await();
  failure_.rethrow_if_set();
}

std::int64_t ThreadedHostDevice::completed_ns(EventId id) const {
  const std::shared_ptr<Ticket> ticket = event_of(id).latest();
  require_argument(ticket != nullptr, "elapsed_ns",
                   "an event was never recorded; record both first");
  return static_cast<std::int64_t>(ticket->completed_ns());
}

std::int64_t ThreadedHostDevice::elapsed_ns(EventId begin, EventId end) const {
  return completed_ns(end) - completed_ns(begin);
}

void ThreadedHostDevice::copy(std::byte* target, const std::byte* source, std::uint64_t size_bytes,
                              StreamId stream) {
  HostStream& queue = stream_of(stream);
  if (size_bytes == 0) return;
  require_argument(target != nullptr && source != nullptr, "copy", "target or source is null");
  require_argument(is_disjoint(target, source, size_bytes), "copy",
                   fmt::format("target and source overlap within {} bytes; copy by way of a third "
                               "buffer",
                               size_bytes));
  queue.enqueue(CopyTask{target, source, size_bytes});
}

void ThreadedHostDevice::fill_zero(std::byte* target, std::uint64_t size_bytes, StreamId stream) {
  HostStream& queue = stream_of(stream);
  if (size_bytes == 0) return;
  require_argument(target != nullptr, "fill_zero", "the target is null");
  queue.enqueue(FillZeroTask{target, size_bytes});
}

void ThreadedHostDevice::call_host(StreamId stream, std::function<void()> function) {
  require_argument(function != nullptr, "call_host", "the function is empty");
  stream_of(stream).enqueue(CallHostTask{.function = std::move(function)});
}

void ThreadedHostDevice::notify(StreamId stream, std::function<void()> function) {
  require_argument(function != nullptr, "notify", "the function is empty");
  stream_of(stream).enqueue(CallHostTask{.function = std::move(function), .is_notice = true});
}

void ThreadedHostDevice::launch(StreamId stream, std::function<void()> work) {
  require_argument(work != nullptr, "launch", "the work is an empty function");
  stream_of(stream).enqueue(LaunchTask{std::move(work)});
}

void ThreadedHostDevice::occupy(StreamId stream, std::uint64_t duration_ns) {
  stream_of(stream).enqueue(OccupyTask{duration_ns});
}

}  // namespace

std::unique_ptr<HostDevice> make_host_device(const HostDeviceOptions& options) {
  if (options.copy_bytes_per_second != 0 && options.copy_bytes_per_second < kCopyRateMin) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("copy_bytes_per_second of the host device is {}; it must be 0 (not "
                            "slowed down) or at least {}",
                            options.copy_bytes_per_second, kCopyRateMin));
  }
  return std::make_unique<ThreadedHostDevice>(options);
}

}  // namespace sluice
