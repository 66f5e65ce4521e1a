// Reading and setting the state, several blocks at once: exact bits, each block read once, in the
// memory of the lanes.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <fstream>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include <sluice/checkpoint.h>
#include <sluice/units.h>
#include "base/moment_codes.h"
#include "engine/engine_over_queue.h"
#include "engine/plan/placement.h"
#include "io/io_queue.h"
#include "tests/support/expect_error.h"
#include "tests/support/flip_bit.h"
#include "tests/support/memory_source.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

constexpr std::uint64_t kBlockElements = 4096;

// Tensors that begin and end inside of blocks; the second one has a dozen.
ModelSpec long_model() {
  ModelSpec model;
  model.units = {
      {.name = "a",
       .tensors = {{.name = "a.bias", .shape = {513}},
                   {.name = "a.weight", .shape = {12 * kBlockElements + 77}},
                   {.name = "a.tail", .shape = {3 * kBlockElements}}}},
      {.name = "b", .tensors = {{.name = "b.weight", .shape = {5 * kBlockElements - 1}}}}};
  return model;
}

Config config_with(const std::string& path, std::uint32_t lanes) {
  Config config = toy_config(path);
  config.placement = {.parameters = TierChoice::kNvme, .optimizer = TierChoice::kNvme};
  config.storage.block_elements = kBlockElements;
  config.optimizer.lanes = lanes;
  return config;
}

float value_of(const TensorPlace& tensor, StateKind kind, std::uint64_t element) {
  return static_cast<float>((element * 7 + index_of(tensor.id) * 1013) % 8191 + 1) *
         (kind == StateKind::kMaster   ? 1e-3f
          : kind == StateKind::kExpAvg ? 1e-4f
                                       : 1e-5f);
}

class Formula : public StateSource {
 public:
  StatePosition position() const override { return {.step = 5}; }
  void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first,
            std::span<float> values) override {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = value_of(tensor, kind, first + i);
  }
};

// The reads of an engine: how many, and where.
struct Reads {
  struct Place {
    int descriptor = -1;
    std::uint64_t offset_bytes = 0;
  };

  void clear() {
    const std::scoped_lock lock(mutex);
    places.clear();
  }
  std::vector<Place> all() {
    const std::scoped_lock lock(mutex);
    return places;
  }
  std::size_t count() { return all().size(); }

  std::mutex mutex;
  std::vector<Place> places;  // guarded by mutex
};

class WatchedReads final : public IoQueue {
 public:
  WatchedReads(std::unique_ptr<IoQueue> queue, Reads& reads)
      : queue_(std::move(queue)), reads_(reads) {}
  void submit(std::span<IoRequest* const> requests) override {
    {
      const std::scoped_lock lock(reads_.mutex);
      for (const IoRequest* request : requests) {
        if (request->kind == IoKind::kRead)
          reads_.places.push_back({request->descriptor, request->offset_bytes});
      }
    }
    queue_->submit(requests);
  }
  void wait_idle() override { queue_->wait_idle(); }
  IoCounters counters() const override { return queue_->counters(); }
  std::string_view name() const override { return queue_->name(); }

 private:
  std::unique_ptr<IoQueue> queue_;
  Reads& reads_;
};

class StateAccessTest : public testing::Test {
 protected:
  Engine& make(std::uint32_t lanes, OptimizerState state = OptimizerState::kFp32) {
    Config config = config_with(directory_.path(), lanes);
    config.optimizer.state = state;
    engine_.reset(new Engine(EngineOverQueue::make(
        config, long_model(), *device_, [this](std::unique_ptr<IoQueue> queue) {
          return std::make_unique<WatchedReads>(std::move(queue), reads_);
        })));
    return *engine_;
  }
  void expect_values(const TensorPlace& tensor, StateKind kind, std::uint64_t first,
                     std::uint64_t count) {
    std::vector<float> values(count);
    engine_->read_state(tensor.id, kind, first, std::as_writable_bytes(std::span(values)));
    for (std::uint64_t i = 0; i < count; ++i)
      ASSERT_EQ(values[i], value_of(tensor, kind, first + i)) << tensor.name << " " << first + i;
  }

  TempDirectory directory_;
  std::unique_ptr<HostDevice> device_ = make_host_device({.memory_bytes = 64_MiB});
  Reads reads_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(StateAccessTest, AnyRangeWithAnyNumberOfLanesHasItsValues) {
  std::mt19937_64 random(11);
  for (const std::uint32_t lanes : {1, 2, 3, 7}) {
    Engine& engine = make(lanes);
    Formula formula;
    engine.restore(formula);
    const auto draw = [&](std::uint64_t end) {
      return std::uniform_int_distribution<std::uint64_t>(0, end)(random);
    };
    for (int i = 0; i < 60; ++i) {
      const TensorPlace& tensor = engine.tensors()[draw(engine.tensors().size() - 1)];
      const StateKind kind =
          std::array{StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq}[draw(2)];
      std::uint64_t first = draw(tensor.element_count);
      // A few pieces, each where the one before ended.
      for (int piece = 0; piece < 3; ++piece) {
        const std::uint64_t count = draw(tensor.element_count - first);
        expect_values(tensor, kind, first, count);
        first += count;
      }
    }
    engine_.reset();
  }
}

TEST_F(StateAccessTest, PiecesInOrderReadEachBlockOnce) {
  Engine& engine = make(4);
  Formula formula;
  engine.restore(formula);
  const TensorPlace& tensor = engine.tensors()[1];
  reads_.clear();
  // The tensor begins in the first block. The piece that reaches the second one takes along those
  // that follow.
  constexpr std::uint64_t kPiece = 700;
  for (std::uint64_t first = 0; first < tensor.element_count; first += kPiece) {
    const std::uint64_t count = std::min(kPiece, tensor.element_count - first);
    expect_values(tensor, StateKind::kExpAvg, first, count);
    const std::uint64_t end = tensor.offset_elements + first + count;
    if (end <= kBlockElements) {
      EXPECT_EQ(reads_.count(), 2u);
    } else if (end <= 4 * kBlockElements) {
      EXPECT_EQ(reads_.count(), 2u * 4) << first;
    }
  }
  EXPECT_EQ(reads_.count(), 2u * 13);  // two planes of each block
  reads_.clear();
  expect_values(tensor, StateKind::kMaster, 0, tensor.element_count);
  EXPECT_LE(reads_.count(), 2u * 13);
  EXPECT_GE(reads_.count(), 2u * 9);  // at most four blocks are still there
}

// A block that is read ahead has been asked for by no call. Its failure is that of the call that
// asks for it, and is over when the block is whole again.
TEST_F(StateAccessTest, ADamagedBlockThatIsReadAheadFailsTheCallThatWantsIt) {
  Engine& engine = make(4);
  Formula formula;
  engine.restore(formula);
  const TensorPlace& tensor = engine.tensors()[1];
  const std::uint64_t first_of_next = kBlockElements - tensor.offset_elements;
  const std::uint64_t first_of_damaged = first_of_next + 2 * kBlockElements;
  reads_.clear();
  expect_values(tensor, StateKind::kExpAvg, first_of_damaged, 1);
  const std::vector<Reads::Place> places = reads_.all();
  ASSERT_EQ(places.size(), 2u);    // its two planes
  (void)engine.begin_inference();  // what has been read is forgotten
  for (const Reads::Place& place : places) flip_bit(place.descriptor, place.offset_bytes);

  expect_values(tensor, StateKind::kExpAvg, 0, 700);
  reads_.clear();
  expect_values(tensor, StateKind::kExpAvg, 700, first_of_next + 1 - 700);
  EXPECT_TRUE(std::ranges::any_of(reads_.all(), [&](const Reads::Place& read) {
    return read.descriptor == places[0].descriptor && read.offset_bytes == places[0].offset_bytes;
  })) << "the damaged block has not been read ahead";
  expect_values(tensor, StateKind::kExpAvg, first_of_next + 1, 2 * kBlockElements - 1);
  float value = 0;
  const std::string message = expect_error(ErrorCode::kDamaged, [&] {
    engine.read_state(tensor.id, StateKind::kExpAvg, first_of_damaged,
                      std::as_writable_bytes(std::span(&value, 1)));
  });
  EXPECT_NE(message.find("\"a\" block 3"), std::string::npos) << message;

  for (const Reads::Place& place : places) flip_bit(place.descriptor, place.offset_bytes);
  expect_values(tensor, StateKind::kExpAvg, first_of_damaged, kBlockElements);
}

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

// Inference uses the parameter slots, so what lay there is gone.
TEST_F(StateAccessTest, AnInferenceInBetweenChangesNothing) {
  Engine& engine = make(2);
  Formula formula;
  engine.restore(formula);
  const Stream stream(*device_, "compute");
  for (const StateKind kind : {StateKind::kMaster, StateKind::kExpAvg}) {
    expect_values(engine.tensors()[3], kind, 0, 100);
    {
      Inference inference = engine.begin_inference();
      for (std::uint32_t unit = 0; unit < 2; ++unit) (void)inference.acquire(UnitId{unit}, stream);
    }
    expect_values(engine.tensors()[3], StateKind::kMaster, 0, 100);
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
  const std::uint64_t pools = engine.placement().host_bytes() + engine.placement().device_bytes();
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
