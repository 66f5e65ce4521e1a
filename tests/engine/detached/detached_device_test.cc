// The detached optimizer with parameters and gradients on a device: the scalar definition's bits,
// in the application's order of work, wherever the state is.
#include <atomic>
#include <chrono>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <optional>
#include <thread>
#include <vector>

#include <sluice/error.h>
#include <sluice/host_device.h>
#include "engine/detached/detached_over_queue.h"
#include "tests/engine/detached/detached_support.h"
#include "tests/support/campaign.h"
#include "tests/support/delays.h"
#include "tests/support/expect_error.h"
#include "tests/support/fault_queue.h"
#include "tests/support/forwarding_device.h"

namespace sluice::test {
namespace {

// Copies to the buffer that delay() names begin late. Counts the bytes that leave the buffer that
// watch() names.
class LateDevice final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  void delay(const DeviceBuffer& buffer) { late_ = &buffer; }
  void copy(std::byte* target, const std::byte* source, std::uint64_t size_bytes,
            StreamId stream) override {
    if (late_ != nullptr && target >= late_->data() && target < late_->data() + late_->size_bytes())
      launch(stream, [] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); });
    if (watched_ != nullptr && source >= watched_->data() &&
        source < watched_->data() + watched_->size_bytes())
      left_bytes_ += size_bytes;
    ForwardingDevice::copy(target, source, size_bytes, stream);
  }
  void watch(const DeviceBuffer& buffer) { watched_ = &buffer; }
  std::uint64_t take_bytes_that_left() { return left_bytes_.exchange(0); }

 private:
  const DeviceBuffer* late_ = nullptr;     // set before there are copies
  const DeviceBuffer* watched_ = nullptr;  // as late_
  std::atomic<std::uint64_t> left_bytes_ = 0;
};

class DetachedDeviceTest : public DetachedTest {
 protected:
  // Every tensor but the last is on the device.
  std::vector<DetachedTensor> described() const {
    std::vector<DetachedTensor> made = description();
    for (std::size_t id = 0; id + 1 < made.size(); ++id) made[id].is_on_device = true;
    return made;
  }
  bool is_remote(std::uint32_t id) const { return id + 1 < tensors_.size(); }

  void make_remote() {
    parameters_.clear();
    gradients_.clear();
    for (const DetachedState& tensor : tensors_) {
      parameters_.emplace_back(*device_, tensor.parameter.size(), "parameter");
      gradients_.emplace_back(*device_, tensor.gradient.size() * sizeof(float), "gradient");
    }
  }

  // The next update of a tensor on the device. Its parameter and gradient come by work on the
  // application's stream that begins late, so an update that does not wait reads other values.
  DetachedUpdate next_remote(OptimizerKind kind, std::uint32_t id) {
    const std::vector<std::byte> parameter = tensors_[id].parameter;
    DetachedUpdate update = next(kind, id);
    device_->launch(stream_.id(),
                    [] { std::this_thread::sleep_for(std::chrono::milliseconds(2)); });
    device_->launch(stream_.id(), [this, id, parameter, gradient = tensors_[id].gradient] {
      if (parameter.empty()) return;
      std::memcpy(parameters_[id].data(), parameter.data(), parameter.size());
      std::memcpy(gradients_[id].data(), gradient.data(), gradient.size() * sizeof(float));
    });
    update.parameter = parameters_[id].data();
    update.gradient = gradients_[id].data();
    return update;
  }

  // The application's parameter becomes the one on the device.
  void fetch(std::uint32_t id) {
    if (!is_remote(id) || tensors_[id].count() == 0) return;
    std::memcpy(tensors_[id].parameter.data(), parameters_[id].data(),
                tensors_[id].parameter.size());
  }

  std::vector<DetachedUpdate> next_of_all(OptimizerKind kind) {
    std::vector<DetachedUpdate> updates;
    for (std::uint32_t id = 0; id < tensors_.size(); ++id)
      updates.push_back(is_remote(id) ? next_remote(kind, id) : next(kind, id));
    return updates;
  }

  std::unique_ptr<LateDevice> device_ = std::make_unique<LateDevice>(
      make_delayed_device(make_host_device({.memory_bytes = 16_MiB}), /*seed=*/11, /*us_max=*/300));
  std::vector<DeviceBuffer> parameters_;
  std::vector<DeviceBuffer> gradients_;
  Stream stream_{*device_, "application"};  // goes first, after its work
};

TEST_F(DetachedDeviceTest, EqualsTheScalarDefinitionForEveryTypeAndPlacement) {
  const OptimizerKind kind = OptimizerKind::kAdamW;
  for (const DType dtype : {DType::kFp32, DType::kBf16, DType::kFp16}) {
    for (const TierChoice tier : {TierChoice::kHost, TierChoice::kNvme, TierChoice::kAuto}) {
      SCOPED_TRACE(fmt::format("{} {}", static_cast<int>(dtype), static_cast<int>(tier)));
      make_tensors(dtype, counts_);
      make_remote();
      Config made = config(kind, tier);
      made.memory.host_bytes = tier == TierChoice::kHost ? 8_MiB : 600_KiB;
      DetachedOptimizer optimizer(made, described(), *device_);
      for (int step = 0; step < 4; ++step) {
        if (step == 2) set(tensors_[0], 7, 3.25f);  // the application changes a parameter
        const std::vector<DetachedUpdate> updates = next_of_all(kind);
        if (step % 2 == 0) {
          optimizer.begin(updates, stream_.id());
        } else {
          for (const DetachedUpdate& update : updates) optimizer.begin({&update, 1}, stream_.id());
        }
        for (std::uint32_t id = 0; id < tensors_.size(); ++id) {
          optimizer.wait(id);
          fetch(id);
          ASSERT_TRUE(tensors_[id].parameter == tensors_[id].oracle_parameter)
              << "tensor " << id << " in step " << step;
        }
      }
      optimizer.wait_all();
      expect_equal(optimizer, kind);
      const DetachedReport report = optimizer.report();
      EXPECT_LE(report.host_bytes, *made.memory.host_bytes);
      EXPECT_EQ(report.write_bytes == 0, tier == TierChoice::kHost);
      EXPECT_EQ(report.adopted_elements, dtype == DType::kFp32 ? 0u : 1u);
    }
  }
}

TEST_F(DetachedDeviceTest, ParametersComeDownOnlyWhereTheyHaveChanged) {
  const OptimizerKind kind = OptimizerKind::kAdamW;
  for (const DType dtype : {DType::kFp32, DType::kBf16, DType::kFp16}) {
    SCOPED_TRACE(static_cast<int>(dtype));
    make_tensors(dtype, {40'000, 1});
    make_remote();
    device_->watch(parameters_[0]);
    Config made = config(kind, TierChoice::kNvme);
    made.memory.host_bytes = 2_MiB;
    made.storage.block_elements = 4096;
    DetachedOptimizer optimizer(made, described(), *device_);
    const std::uint64_t all = parameters_[0].size_bytes();
    const std::uint64_t block = 4096 * size_of(dtype);
    const auto step = [&](std::uint64_t expected, const char* what) {
      const DetachedUpdate update = next_remote(kind, 0);
      optimizer.begin({&update, 1}, stream_.id());
      optimizer.wait(0);
      fetch(0);
      EXPECT_TRUE(tensors_[0].parameter == tensors_[0].oracle_parameter) << what;
      // A parameter of fp32 is the master itself.
      EXPECT_EQ(device_->take_bytes_that_left(), dtype == DType::kFp32 ? all : expected) << what;
    };
    step(all, "the first update");
    step(0, "nothing has changed");
    set(tensors_[0], 39'999, 3.25f);
    step(40'000 * size_of(dtype) % block, "the last element has changed");
    std::swap(tensors_[0].parameter[0], tensors_[0].parameter[4 * size_of(dtype)]);
    std::swap(tensors_[0].parameter[1], tensors_[0].parameter[4 * size_of(dtype) + 1]);
    step(block, "two values have changed places");
    step(0, "nothing has changed again");
    if (dtype == DType::kFp32) continue;
    // A master that is set counts only together with its parameter, which still has the old value.
    const float set_master[] = {5.0f};
    optimizer.wait_all();
    optimizer.write(0, StateKind::kMaster, 4096 + 3, set_master);
    tensors_[0].low[4096 + 3] = 0;
    if (dtype == DType::kFp16) {
      std::uint16_t bits = 0;
      std::memcpy(&bits, tensors_[0].parameter.data() + 2 * (4096 + 3), 2);
      tensors_[0].master[4096 + 3] = float_from_fp16(bits);
    }
    step(block, "a master has been set");
    EXPECT_EQ(optimizer.report().adopted_elements, 4u);
    optimizer.wait_all();
    expect_equal(optimizer, kind);
  }
}

// The second update begins before the first one's parameters are back.
TEST_F(DetachedDeviceTest, UpdatesOfOneTensorFollowEachOther) {
  const OptimizerKind kind = OptimizerKind::kAdamW;
  make_tensors(DType::kFp32, {40'000, 1});
  make_remote();
  device_->delay(parameters_[0]);
  Config made = config(kind, TierChoice::kHost);
  made.memory.host_bytes = 4_MiB;
  DetachedOptimizer optimizer(made, described(), *device_);
  const DetachedUpdate first = next_remote(kind, 0);
  const std::vector<float> gradient = tensors_[0].gradient;
  device_->synchronize(stream_.id());
  optimizer.begin({&first, 1}, stream_.id());
  tensors_[0].parameter = tensors_[0].oracle_parameter;
  DetachedUpdate second = next(kind, 0);
  second.parameter = first.parameter;
  const DeviceBuffer other(*device_, tensors_[0].gradient.size() * sizeof(float), "gradient");
  std::memcpy(other.data(), tensors_[0].gradient.data(), other.size_bytes());
  second.gradient = other.data();
  optimizer.begin({&second, 1}, stream_.id());
  optimizer.wait(0);
  fetch(0);
  EXPECT_TRUE(tensors_[0].parameter == tensors_[0].oracle_parameter);
  optimizer.wait_all();
}

TEST_F(DetachedDeviceTest, DestroyingItWaitsForCopies) {
  make_tensors(DType::kBf16, {65'536, 1});
  make_remote();
  device_->delay(parameters_[0]);
  for (const int milliseconds : {0, 1, 3, 5, 8}) {
    DetachedOptimizer optimizer(config(OptimizerKind::kAdamW, TierChoice::kNvme), described(),
                                *device_);
    const DetachedUpdate update = next_remote(OptimizerKind::kAdamW, 0);
    optimizer.begin({&update, 1}, stream_.id());
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
  }
}

TEST_F(DetachedDeviceTest, AFailureOfTheDeviceIsTheOptimizers) {
  make_tensors(DType::kBf16, {65'536, 1});
  make_remote();
  DetachedOptimizer optimizer(config(OptimizerKind::kAdamW, TierChoice::kNvme), described(),
                              *device_);
  const DetachedUpdate update = next_remote(OptimizerKind::kAdamW, 0);
  device_->launch(stream_.id(), [] { throw Error(ErrorCode::kIo, "the device has failed"); });
  optimizer.begin({&update, 1}, stream_.id());
  const std::string said = expect_error(ErrorCode::kIo, [&] { optimizer.wait(0); });
  EXPECT_NE(said.find("the device has failed"), std::string::npos) << said;
  expect_error(ErrorCode::kIo, [&] { optimizer.wait_all(); });
}

TEST_F(DetachedDeviceTest, MisuseIsRefused) {
  make_tensors(DType::kFp32, {100, 100});
  make_remote();
  const Config made = config(OptimizerKind::kAdamW, TierChoice::kHost);
  std::string said =
      expect_error(ErrorCode::kInvalidArgument, [&] { DetachedOptimizer(made, described()); });
  EXPECT_NE(said.find("\"t0\" is on a device, but no device is given"), std::string::npos) << said;
  DetachedOptimizer optimizer(made, described(), *device_);
  const DetachedUpdate update = next_remote(OptimizerKind::kAdamW, 0);
  said = expect_error(ErrorCode::kInvalidArgument, [&] { optimizer.begin({&update, 1}); });
  EXPECT_NE(said.find("\"t0\" is on the device; give the stream"), std::string::npos) << said;
  EXPECT_EQ(optimizer.pending_tensors(), 0u);
  DetachedOptimizer on_host(made, description());
  said = expect_error(ErrorCode::kInvalidArgument, [&] { on_host.begin({}, stream_.id()); });
  EXPECT_NE(said.find("made without a device"), std::string::npos) << said;
}

// A rank's share of small tensors may have no elements.
TEST_F(DetachedDeviceTest, TensorsWithoutElementsNeedNoStaging) {
  make_tensors(DType::kFp32, {0, 0, 100});
  make_remote();
  DetachedOptimizer optimizer(config(OptimizerKind::kAdamW, TierChoice::kHost), described(),
                              *device_);
  const std::vector<DetachedUpdate> updates = next_of_all(OptimizerKind::kAdamW);
  optimizer.begin(updates, stream_.id());
  optimizer.wait_all();
  expect_equal(optimizer, OptimizerKind::kAdamW);
}

TEST_F(DetachedDeviceTest, TheBudgetHoldsTheStagingMemory) {
  make_tensors(DType::kBf16, {65'536, 1});
  Config made = config(OptimizerKind::kAdamW, TierChoice::kHost);
  made.memory.host_bytes = 2_MiB;  // the records take 786 KiB, the staging memory 2.3 MiB
  const std::string said = expect_error(ErrorCode::kOutOfMemory,
                                        [&] { DetachedOptimizer(made, described(), *device_); });
  EXPECT_NE(said.find("memory.host is 2.00 MiB"), std::string::npos) << said;
}

class RandomDetached : public DetachedDeviceTest {
 protected:
  template <typename T>
  T any(std::initializer_list<T> choices) {
    return std::data(choices)[random_() % choices.size()];
  }

  Config draw(std::uint64_t seed) {
    random_.seed(static_cast<std::mt19937::result_type>(seed));
    using enum OptimizerKind;
    moments_ = any({OptimizerState::kFp32, OptimizerState::kBf16, OptimizerState::k8bit});
    kind_ = any({kAdamW, kAdam, kLion, kAdagrad});
    if (moments_ == OptimizerState::kFp32 && random_() % 5 == 0) kind_ = kSgd;
    Config made = config(kind_, any({TierChoice::kHost, TierChoice::kNvme, TierChoice::kNvme}));
    made.memory.host_bytes = 8_MiB;
    made.threads = any({1u, 2u});
    made.storage.block_elements = any({4096u, 8192u, 65'536u});
    made.storage.backend = any({IoBackend::kAuto, IoBackend::kThreads, IoBackend::kSync});
    made.storage.queue_depth = any({1u, 3u, 32u});
    made.storage.verify = any({Verify::kFull, Verify::kSample, Verify::kOff});
    std::vector<std::uint64_t> counts;
    for (std::uint64_t left = 2 + random_() % 6; left > 0; --left)
      counts.push_back(any<std::uint64_t>({0, 1, 255, 257, 4096, 4097, random_() % 70'000}));
    make_tensors(any({DType::kFp32, DType::kBf16, DType::kFp16}), counts);
    make_remote();
    return made;
  }

  // Steps whose tensors, order and calls are random. Updates of some tensors go on in later steps:
  // the test leaves those tensors alone until it has waited for them.
  void train_at_random(DetachedOptimizer& optimizer) {
    std::vector<bool> is_pending(tensors_.size(), false);
    const auto wait = [&](std::uint32_t id) {
      optimizer.wait(id);
      if (is_pending[id]) fetch(id);
      is_pending[id] = false;
      EXPECT_TRUE(tensors_[id].parameter == tensors_[id].oracle_parameter) << "tensor " << id;
    };
    for (int step = 0; step < 6; ++step) {
      std::vector<std::uint32_t> order(tensors_.size());
      std::iota(order.begin(), order.end(), 0u);
      std::ranges::shuffle(order, random_);
      std::vector<DetachedUpdate> updates;
      for (const std::uint32_t id : order) {
        if (random_() % 2 == 0 && is_pending[id]) wait(id);
        if (is_pending[id] || random_() % 4 == 0) continue;
        const std::uint64_t count = tensors_[id].count();
        if (count != 0 && random_() % 4 == 0) set(tensors_[id], random_() % count, 3.25f);
        updates.push_back(is_remote(id) ? next_remote(kind_, id) : next(kind_, id));
        is_pending[id] = true;
        if (random_() % 2 == 0) continue;
        optimizer.begin(updates, stream_.id());
        updates.clear();
      }
      optimizer.begin(updates, stream_.id());
    }
    for (std::uint32_t id = 0; id < tensors_.size(); ++id) wait(id);
  }

  OptimizerKind kind_ = OptimizerKind::kAdamW;
};

TEST_F(RandomDetached, AnyOptimizerUnderAnyDelaysGivesTheDefinitionsBits) {
  for (const std::uint64_t seed : seeds_of(campaign(25))) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    const Config made = draw(seed);
    DetachedOptimizer optimizer = DetachedOverQueue::make(
        made, described(),
        [&](std::unique_ptr<IoQueue> inner) {
          return make_fault_queue(std::move(inner), {.seed = seed, .delay_us_max = 500});
        },
        device_.get());
    train_at_random(optimizer);
    optimizer.wait_all();
    expect_equal(optimizer, kind_);
    if (HasFailure()) break;
  }
}

}  // namespace
}  // namespace sluice::test
