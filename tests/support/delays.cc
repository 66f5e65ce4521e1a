#include "tests/support/delays.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "engine/run/task_thread.h"
#include "tests/support/forwarding_device.h"

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

class DelayedDevice : public ForwardingDevice {
 public:
  DelayedDevice(std::unique_ptr<HostDevice> inner, std::uint64_t seed, std::uint32_t us_max)
      : ForwardingDevice(std::move(inner)), us_max_(us_max), state_(seed) {}

  void copy(std::byte* target, const std::byte* source, std::uint64_t size_bytes,
            StreamId stream) override {
    delay(stream);
    ForwardingDevice::copy(target, source, size_bytes, stream);
  }
  void fill_zero(std::byte* target, std::uint64_t size_bytes, StreamId stream) override {
    delay(stream);
    ForwardingDevice::fill_zero(target, size_bytes, stream);
  }
  void call_host(StreamId stream, std::function<void()> function) override {
    delay(stream);
    ForwardingDevice::call_host(stream, std::move(function));
  }
  void notify(StreamId stream, std::function<void()> function) override {
    delay(stream);
    ForwardingDevice::notify(stream, std::move(function));
  }
  void launch(StreamId stream, std::function<void()> work) override {
    delay(stream);
    ForwardingDevice::launch(stream, std::move(work));
  }

 private:
  void delay(StreamId stream) {
    ForwardingDevice::call_host(stream, [this] { wait_at_random(state_, us_max_); });
  }

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
