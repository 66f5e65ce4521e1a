#include "tests/support/delays.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "engine/run/task_thread.h"

namespace sluice::test {
namespace {

std::uint64_t mix(std::uint64_t value) {  // SplitMix64's finalizer
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

// One in four waits: where all wait alike, the order stays what it was.
void wait_at_random(std::atomic<std::uint64_t>& state, std::uint32_t us_max) {
  const std::uint64_t random = mix(state.fetch_add(1));
  if (random % 4 == 0)
    std::this_thread::sleep_for(std::chrono::microseconds((random >> 8) % (us_max + 1)));
}

std::atomic<std::uint64_t> task_state;
std::atomic<std::uint32_t> task_us_max;

void delay_task() {
  wait_at_random(task_state, task_us_max);
}

class DelayedDevice : public HostDevice {
 public:
  DelayedDevice(std::unique_ptr<HostDevice> inner, std::uint64_t seed, std::uint32_t us_max)
      : inner_(std::move(inner)), us_max_(us_max), state_(seed) {}

  std::string_view name() const override { return inner_->name(); }
  bool has_own_memory() const override { return inner_->has_own_memory(); }
  std::byte* allocate(std::uint64_t size_bytes, std::string_view purpose) override {
    return inner_->allocate(size_bytes, purpose);
  }
  void free(std::byte* memory) noexcept override { inner_->free(memory); }
  std::uint64_t capacity_bytes() const override { return inner_->capacity_bytes(); }
  std::uint64_t allocated_bytes() const override { return inner_->allocated_bytes(); }
  void register_host_memory(std::span<std::byte> memory) override {
    inner_->register_host_memory(memory);
  }
  void unregister_host_memory(std::span<std::byte> memory) noexcept override {
    inner_->unregister_host_memory(memory);
  }
  StreamId create_stream(std::string_view name, StreamPriority priority) override {
    return inner_->create_stream(name, priority);
  }
  void destroy_stream(StreamId stream) noexcept override { inner_->destroy_stream(stream); }
  EventId create_event() override { return inner_->create_event(); }
  void destroy_event(EventId event) noexcept override { inner_->destroy_event(event); }
  void record(EventId event, StreamId stream) override { inner_->record(event, stream); }
  void wait(StreamId stream, EventId event) override { inner_->wait(stream, event); }
  bool is_complete(EventId event) const override { return inner_->is_complete(event); }
  void synchronize(EventId event) override { inner_->synchronize(event); }
  void synchronize(StreamId stream) override { inner_->synchronize(stream); }
  std::int64_t elapsed_ns(EventId begin, EventId end) const override {
    return inner_->elapsed_ns(begin, end);
  }
  void copy(std::byte* target, const std::byte* source, std::uint64_t size_bytes,
            StreamId stream) override {
    delay(stream);
    inner_->copy(target, source, size_bytes, stream);
  }
  void fill_zero(std::byte* target, std::uint64_t size_bytes, StreamId stream) override {
    delay(stream);
    inner_->fill_zero(target, size_bytes, stream);
  }
  void call_host(StreamId stream, std::function<void()> function) override {
    delay(stream);
    inner_->call_host(stream, std::move(function));
  }
  void launch(StreamId stream, std::function<void()> work) override {
    delay(stream);
    inner_->launch(stream, std::move(work));
  }
  void occupy(StreamId stream, std::uint64_t duration_ns) override {
    inner_->occupy(stream, duration_ns);
  }

 private:
  void delay(StreamId stream) {
    inner_->call_host(stream, [this] { wait_at_random(state_, us_max_); });
  }

  std::unique_ptr<HostDevice> inner_;
  std::uint32_t us_max_;
  std::atomic<std::uint64_t> state_;
};

}  // namespace

TaskDelays::TaskDelays(std::uint64_t seed, std::uint32_t us_max) {
  task_state = seed;
  task_us_max = us_max;
  TaskThread::set_before_task(&delay_task);
}

TaskDelays::~TaskDelays() {
  TaskThread::set_before_task(nullptr);
}

std::unique_ptr<HostDevice> make_delayed_device(std::unique_ptr<HostDevice> inner,
                                                std::uint64_t seed, std::uint32_t us_max) {
  return std::make_unique<DelayedDevice>(std::move(inner), seed, us_max);
}

Watchdog::Watchdog(std::chrono::seconds limit, std::string message)
    : thread_([this, limit, message = std::move(message)] {
        std::unique_lock lock(mutex_);
        if (ended_.wait_for(lock, limit, [this] { return has_ended_; })) return;
        std::fprintf(stderr, "no end after %lld s: %s\n", static_cast<long long>(limit.count()),
                     message.c_str());
        std::abort();
      }) {}

Watchdog::~Watchdog() {
  {
    const std::scoped_lock lock(mutex_);
    has_ended_ = true;
  }
  ended_.notify_one();
  thread_.join();
}

}  // namespace sluice::test
