// Setting the state, several blocks at once: exact bits, in the memory of the lanes.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include <fmt/format.h>

#include <sluice/checkpoint.h>
#include <sluice/units.h>
#include "base/moment_codes.h"
#include "engine/engine_access.h"
#include "engine/plan/placement.h"
#include "tests/engine/store/state_access_cases.h"
#include "tests/support/expect_error.h"
#include "tests/support/memory_source.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

// Moments of 8 bits that the source gives as exactly what codes mean: each group of 256 elements
// has a scale of its own, which is a power of two.
class Codes final : public Formula {
 public:
  static float value_of(const TensorPlace& tensor, StateKind kind, std::uint64_t element) {
    const std::uint64_t place = tensor.offset_elements + element;
    const std::uint64_t group = place / 256;
    const float scale = std::ldexp(1.0F, -static_cast<int>(group % 37));
    // The first element is as large as the scale.
    const auto code = place % 256 == 0 ? 255 : static_cast<std::uint32_t>(place * 31 + group) % 256;
    return scale *
           code_value(kind == StateKind::kExpAvg ? CodeBook::kSigned : CodeBook::kUnsigned, code);
  }
  void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first,
            std::span<float> values) override {
    if (kind == StateKind::kMaster) return Formula::read(tensor, kind, first, values);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = value_of(tensor, kind, first + i);
  }
};

TEST_F(StateAccessTest, AnyRangeOfMomentsOfEightBitsHasWhatTheirCodesMean) {
  Engine& engine = make(3, OptimizerState::k8bit);
  Codes codes;
  engine.restore(codes);
  std::mt19937_64 random(12);
  for (int i = 0; i < 200; ++i) {
    const TensorPlace& tensor = engine.tensors()[random() % engine.tensors().size()];
    const StateKind kind = i % 2 == 0 ? StateKind::kExpAvg : StateKind::kExpAvgSq;
    const std::uint64_t first = random() % tensor.element_count;
    std::vector<float> values(1 + random() % (tensor.element_count - first));
    engine.read_state(tensor.id, kind, first, std::as_writable_bytes(std::span(values)));
    for (std::size_t k = 0; k < values.size(); ++k)
      ASSERT_EQ(values[k], Codes::value_of(tensor, kind, first + k))
          << tensor.name << " " << first << "+" << k;
  }
}

// Each reader waits until another one reads, too.
class Together final : public StateSource {
 public:
  StatePosition position() const override { return {.step = 5}; }
  bool allows_threads() const override { return true; }
  void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first,
            std::span<float> values) override {
    formula_.read(tensor, kind, first, values);
    std::unique_lock lock(mutex_);
    threads_.insert(std::this_thread::get_id());
    changed_.notify_all();
    changed_.wait_for(lock, std::chrono::seconds(20), [this] { return threads_.size() >= 2; });
  }
  std::size_t threads() const { return threads_.size(); }

 private:
  Formula formula_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<std::thread::id> threads_;
};

TEST_F(StateAccessTest, ASourceThatAllowsItIsReadByThreads) {
  Engine& engine = make(4);
  Together together;
  engine.restore(together);
  EXPECT_GE(together.threads(), 2u);
  EXPECT_LE(together.threads(), 4u);
  for (const TensorPlace& tensor : engine.tensors()) {
    for (const StateKind kind : {StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq})
      expect_values(tensor, kind, 0, tensor.element_count);
  }
}

TEST_F(StateAccessTest, AnotherSourceIsReadByTheCallersThreadAlone) {
  class Asking final : public Formula {
   public:
    void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first,
              std::span<float> values) override {
      EXPECT_EQ(std::this_thread::get_id(), caller_);
      Formula::read(tensor, kind, first, values);
    }

   private:
    std::thread::id caller_ = std::this_thread::get_id();
  };
  Asking asking;
  make(4).restore(asking);
}

// A failure on any thread reaches the caller, and the engine takes another source.
TEST_F(StateAccessTest, AFailureOnAThreadIsTheCalls) {
  class Failing final : public Formula {
   public:
    bool allows_threads() const override { return true; }
    void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first,
              std::span<float> values) override {
      if (tensor.name == "b.weight") throw Error(ErrorCode::kDamaged, "b.weight is gone");
      Formula::read(tensor, kind, first, values);
    }
  };
  Engine& engine = make(3);
  Failing failing;
  EXPECT_EQ(expect_error(ErrorCode::kDamaged, [&] { engine.restore(failing); }),
            "b.weight is gone");
  Formula formula;
  engine.restore(formula);
  expect_values(engine.tensors()[3], StateKind::kMaster, 0, 100);
}

// The memory of new pools is zero, and is not cleared once more; behind a failure it has to be.
TEST(StateAccessHomes, KeepNothingOfAStateThatFailed) {
  class Failing final : public Formula {
   public:
    void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first,
              std::span<float> values) override {
      if (tensor.name == "b.weight") throw Error(ErrorCode::kDamaged, "b.weight is gone");
      Formula::read(tensor, kind, first, values);
    }
  };
  const TempDirectory directory;
  Config config = config_with(directory.path(), 4);
  config.placement = {.parameters = TierChoice::kHost, .optimizer = TierChoice::kHost};
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  Engine engine(config, long_model(), *device);
  Failing failing;
  EXPECT_EQ(expect_error(ErrorCode::kDamaged, [&] { engine.restore(failing); }),
            "b.weight is gone");
  engine.initialize([](const TensorPlace& tensor, std::uint64_t first, std::span<float> values) {
    Formula().read(tensor, StateKind::kMaster, first, values);
  });
  for (const TensorPlace& tensor : engine.tensors()) {
    std::vector<float> values(tensor.element_count);
    engine.read_state(tensor.id, StateKind::kExpAvgSq, 0,
                      std::as_writable_bytes(std::span(values)));
    EXPECT_EQ(std::ranges::count(values, 0.0f), static_cast<std::ptrdiff_t>(values.size()))
        << tensor.name;
  }
}

// The writes of an engine, by place.
using Written = std::map<std::pair<int, std::uint64_t>, std::vector<std::byte>>;

class WrittenBytes final : public IoQueue {
 public:
  WrittenBytes(std::unique_ptr<IoQueue> queue, Written& written)
      : queue_(std::move(queue)), written_(written) {}
  void submit(std::span<IoRequest* const> requests) override {
    {
      const std::scoped_lock lock(mutex_);
      for (const IoRequest* request : requests) {
        if (request->kind == IoKind::kWrite)
          written_[{static_cast<int>(request->drive), request->offset_bytes}].assign(
              request->data, request->data + request->length_bytes);
      }
    }
    queue_->submit(requests);
  }
  void wait_idle() override { queue_->wait_idle(); }
  IoCounters counters() const override { return queue_->counters(); }
  std::string_view name() const override { return queue_->name(); }

 private:
  std::unique_ptr<IoQueue> queue_;
  std::mutex mutex_;
  Written& written_;  // guarded by mutex_
};

// A place is not cleared for each block. Elements that belong to no tensor are zero all the same,
// whatever block was in the place before.
TEST(StateAccessPadding, IsZeroInEveryPlace) {
  ModelSpec model;
  for (const char* name : {"a", "c", "e"})
    model.units.push_back(
        {.name = name,
         .tensors = {{.name = fmt::format("{}.whole", name), .shape = {2 * kBlockElements}}}});
  for (const char* name : {"b", "d"})
    model.units.push_back(
        {.name = name,
         .tensors = {{.name = fmt::format("{}.one", name), .shape = {100}},
                     {.name = fmt::format("{}.two", name), .shape = {kBlockElements - 296}}}});
  std::ranges::sort(model.units, {}, &UnitSpec::name);
  // Planes of whole pages: behind others, a write has what was in the place.
  for (const OptimizerState state : {OptimizerState::kFp32, OptimizerState::kBf16}) {
    for (const bool is_initial : {false, true}) {
      std::vector<Written> written;
      for (const std::uint32_t lanes : {8, 1}) {
        const TempDirectory directory;
        Config config = config_with(directory.path(), lanes);
        config.optimizer.state = state;
        const auto device = make_host_device({.memory_bytes = 64_MiB});
        Written& own = written.emplace_back();
        Engine engine(
            EngineOverQueue::make(config, model, *device, [&](std::unique_ptr<IoQueue> queue) {
              return std::make_unique<WrittenBytes>(std::move(queue), own);
            }));
        Formula formula;
        if (is_initial)
          engine.initialize(
              [&](const TensorPlace& tensor, std::uint64_t first, std::span<float> values) {
                formula.read(tensor, StateKind::kMaster, first, values);
              });
        else
          engine.restore(formula);
      }
      ASSERT_EQ(written[0].size(), written[1].size());
      for (const auto& [place, bytes] : written[0]) {
        const auto& others = written[1][place];
        const auto [one, other] = std::ranges::mismatch(bytes, others);
        EXPECT_TRUE(one == bytes.end() && other == others.end())
            << name_of(state) << " " << is_initial << ": byte " << one - bytes.begin() << " of "
            << bytes.size() << " at " << place.second;
      }
    }
  }
}

std::uint64_t resident_peak_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    std::uint64_t kilobytes = 0;
    if (word == "VmHWM:" && status >> kilobytes) return kilobytes * 1024;
  }
  return 0;
}

// Save and restore take a fifth of the pools beside them, at most, however long the state and its
// tensors are.
TEST(StateAccessMemory, IsThatOfThePools) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer keeps memory of its own for each byte that is touched";
#endif
  const TempDirectory directory;
  Config config = config_with(directory.path(), 4);
  config.storage.block_elements = 256_KiB;
  ModelSpec model;
  model.units = {{.name = "a", .tensors = {{.name = "a.weight", .shape = {16_MiB}}}}};
  const std::string root = directory.file("checkpoints");
  const auto growth_of = [](const auto& work) {
    std::ofstream("/proc/self/clear_refs") << "5";  // the peak begins anew
    const std::uint64_t before = resident_peak_bytes();
    work();
    return resident_peak_bytes() - before;
  };
  const auto device = make_host_device({.memory_bytes = 160_MiB});
  Engine engine(config, model, *device);
  const std::uint64_t pools =
      placement_of(engine).host_bytes() + placement_of(engine).device_bytes();
  Formula formula;
  EXPECT_LE(growth_of([&] { engine.restore(formula); }), pools / 5);
  EXPECT_LE(growth_of([&] { (void)engine.save(root, {}); }), pools / 5);
  const auto second_device = make_host_device({.memory_bytes = 160_MiB});
  Engine second(config, model, *second_device);
  EXPECT_LE(growth_of([&] { second.restore(*open_checkpoint(root + "/latest").source); }),
            pools / 5)
      << "pools of " << pools;
}

}  // namespace
}  // namespace sluice::test
