// A device of the application's own: Sluice moves state to any accelerator whose memory, streams
// and events the application can reach through <sluice/device.h>. This one is as simple as the
// interface allows: memory with a budget, and one thread that does the work of all streams in the
// order in which it was enqueued. The program trains on it and on Sluice's host device, and
// compares the bits. An argument names the folder for the state; the current one is the default.
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <sluice/engine.h>
#include <sluice/error.h>
#include <sluice/host_device.h>

using namespace sluice;

class OneThreadDevice : public Device {
 public:
  explicit OneThreadDevice(std::uint64_t capacity_bytes) : capacity_bytes_(capacity_bytes) {}
  ~OneThreadDevice() override {
    enqueue([this] { is_over_ = true; });
    thread_.join();
  }

  std::string_view name() const override { return "one thread"; }
  bool has_own_memory() const override { return false; }

  std::byte* allocate(std::uint64_t size_bytes, std::string_view purpose) override {
    if (size_bytes == 0) return nullptr;
    const std::lock_guard lock(mutex_);
    if (size_bytes > capacity_bytes_ - allocated_bytes_)
      throw Error(ErrorCode::kOutOfMemory, std::string(purpose) + " needs " +
                                               std::to_string(size_bytes) + " bytes; " +
                                               std::to_string(allocated_bytes_) + " of " +
                                               std::to_string(capacity_bytes_) + " are in use");
    auto* memory =
        static_cast<std::byte*>(std::aligned_alloc(4096, (size_bytes + 4095) / 4096 * 4096));
    if (memory == nullptr) throw Error(ErrorCode::kOutOfMemory, "no memory on the host");
    std::memset(memory, 0, size_bytes);
    allocated_bytes_ += size_bytes;
    sizes_[memory] = size_bytes;
    return memory;
  }
  void free(std::byte* memory) noexcept override {
    const std::lock_guard lock(mutex_);
    const auto size = sizes_.find(memory);
    if (size == sizes_.end()) return;
    allocated_bytes_ -= size->second;
    sizes_.erase(size);
    std::free(memory);
  }
  std::uint64_t capacity_bytes() const override { return capacity_bytes_; }
  std::uint64_t allocated_bytes() const override {
    const std::lock_guard lock(mutex_);
    return allocated_bytes_;
  }
  void register_host_memory(std::span<std::byte>) override {}
  void unregister_host_memory(std::span<std::byte>) noexcept override {}

  // One thread does everything in order, so a stream is a name and nothing has to wait for an
  // event.
  StreamId create_stream(std::string_view, StreamPriority) override {
    const std::lock_guard lock(mutex_);
    return StreamId{streams_++};
  }
  void destroy_stream(StreamId) noexcept override { finish_all(); }
  EventId create_event() override {
    const std::lock_guard lock(mutex_);
    events_.emplace_back();
    return EventId{static_cast<std::uint32_t>(events_.size() - 1)};
  }
  void destroy_event(EventId) noexcept override {}
  void wait(StreamId, EventId) override {}

  void record(EventId event, StreamId) override {
    const std::lock_guard lock(mutex_);
    const std::uint64_t number = ++at(event).records;
    work_.push_back([this, event, number] {
      const std::lock_guard done(mutex_);
      at(event).completed = number;
      at(event).completed_at = std::chrono::steady_clock::now();
      changed_.notify_all();
    });
    changed_.notify_all();
  }
  bool is_complete(EventId event) const override {
    const std::lock_guard lock(mutex_);
    return at(event).completed == at(event).records;
  }
  void synchronize(EventId event) override {
    std::unique_lock lock(mutex_);
    const std::uint64_t number = at(event).records;
    changed_.wait(lock, [&] { return at(event).completed >= number; });
    if (failure_) std::rethrow_exception(failure_);
  }
  void synchronize(StreamId) override {
    finish_all();
    const std::lock_guard lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
  }
  std::int64_t elapsed_ns(EventId begin, EventId end) const override {
    const std::lock_guard lock(mutex_);
    return std::chrono::nanoseconds(at(end).completed_at - at(begin).completed_at).count();
  }

  void copy(std::byte* target, const std::byte* source, std::uint64_t size_bytes,
            StreamId) override {
    compute([=] { std::memcpy(target, source, size_bytes); });
  }
  void fill_zero(std::byte* target, std::uint64_t size_bytes, StreamId) override {
    compute([=] { std::memset(target, 0, size_bytes); });
  }
  // Host functions run after a failure, too: the engine waits for them.
  void call_host(StreamId, std::function<void()> function) override {
    enqueue([this, function = std::move(function)] { attempt(function); });
  }

  // The application's own computation; skipped after a failure, as copies are.
  void compute(std::function<void()> function) {
    enqueue([this, function = std::move(function)] {
      if (!has_failed()) attempt(function);
    });
  }

 private:
  struct EventState {
    std::uint64_t records = 0, completed = 0;
    std::chrono::steady_clock::time_point completed_at;
  };

  EventState& at(EventId event) { return events_.at(static_cast<std::size_t>(event)); }
  const EventState& at(EventId event) const { return events_.at(static_cast<std::size_t>(event)); }

  void enqueue(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_all();
  }
  void attempt(const std::function<void()>& function) {
    try {
      function();
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
    }
  }
  bool has_failed() const {
    const std::lock_guard lock(mutex_);
    return failure_ != nullptr;
  }
  void finish_all() {
    std::unique_lock lock(mutex_);
    const std::uint64_t number = begun_ + work_.size();
    changed_.wait(lock, [&] { return done_ >= number; });
  }
  void run() {
    while (!is_over_) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !work_.empty(); });
      const std::function<void()> work = std::move(work_.front());
      work_.pop_front();
      ++begun_;
      lock.unlock();
      work();
      lock.lock();
      ++done_;
      changed_.notify_all();
    }
  }

  const std::uint64_t capacity_bytes_;
  bool is_over_ = false;  // thread_ only

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  std::uint64_t begun_ = 0, done_ = 0, allocated_bytes_ = 0;
  std::uint32_t streams_ = 0;
  std::deque<EventState> events_;
  std::map<std::byte*, std::uint64_t> sizes_;
  std::exception_ptr failure_;

  std::thread thread_{[this] { run(); }};  // the last member: it uses the others
};

// Trains two layers of weights towards targets on `device`, whose computation `launch` enqueues.
// Returns the weights.
template <class Launch>
std::vector<float> train(Device& device, const std::string& folder, Launch launch) {
  constexpr std::size_t kCount = 5000;
  Config config;
  config.precision = {.parameters = DType::kFp32, .gradients = DType::kFp32};
  config.memory = {.device_bytes = device.capacity_bytes(), .host_bytes = 4 << 20};
  config.placement = {.parameters = TierChoice::kNvme, .optimizer = TierChoice::kNvme};
  config.storage.paths = {folder};
  ModelSpec model;
  model.units = {{"first", {{"first.weight", {kCount}}}},
                 {"second", {{"second.weight", {kCount}}}}};

  Engine engine(config, model, device);
  engine.initialize([](const TensorPlace&, std::uint64_t, std::span<float> values) {
    for (float& value : values) value = 0;
  });
  const Stream stream(device, "compute");
  for (int number = 0; number < 20; ++number) {
    Step step = engine.begin_step({.learning_rate = 0.01});
    for (const UnitId unit : {UnitId{0}, UnitId{1}})
      const Lease lease = step.acquire(unit, Pass::kForward, stream);
    for (const UnitId unit : {UnitId{1}, UnitId{0}}) {
      const Lease lease = step.acquire(unit, Pass::kBackward, stream);
      const auto* weight = lease.parameter<float>(0);
      auto* gradient = lease.gradient<float>(0);
      launch(stream, [=] {
        for (std::size_t i = 0; i < kCount; ++i)
          gradient[i] += weight[i] - static_cast<float>(i % 97) / 97;
      });
    }
    step.finish();
  }

  std::vector<float> weights(2 * kCount);
  for (const TensorId tensor : {TensorId{0}, TensorId{1}}) {
    const auto half = std::span(weights).subspan(static_cast<std::size_t>(tensor) * kCount, kCount);
    engine.read_state(tensor, StateKind::kMaster, 0, std::as_writable_bytes(half));
  }
  engine.close();
  return weights;
}

int main(int argc, char** argv) try {
  const std::string folder = argc > 1 ? argv[1] : ".";
  OneThreadDevice own(1 << 20);
  const std::vector<float> here =
      train(own, folder, [&](const Stream&, auto work) { own.compute(work); });
  const auto host = make_host_device({.memory_bytes = 1 << 20});
  const std::vector<float> there = train(
      *host, folder, [&](const Stream& stream, auto work) { host->launch(stream.id(), work); });
  const bool same = std::memcmp(here.data(), there.data(), here.size() * sizeof(float)) == 0;
  std::printf("%zu weights on the own device and on Sluice's: %s\n", here.size(),
              same ? "the same bits" : "different");
  return same && here[96] > 0 ? 0 : 1;
} catch (const std::exception& failure) {
  std::fprintf(stderr, "%s\n", failure.what());
  return 1;
}
