// A device that fails while a durable store trains: updates and copies there are skipped without a
// word, and no commit may name what they left behind.
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "tests/engine/exactness_cases.h"
#include "tests/support/forwarding_device.h"
#include "tests/support/same_training.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

// The `at`-th copy on streams of this name fails, and with it all later work.
class FailingCopies final : public ForwardingDevice {
 public:
  FailingCopies(std::unique_ptr<HostDevice> inner, std::string stream, int at)
      : ForwardingDevice(std::move(inner)), name_(std::move(stream)), left_(at) {}

  StreamId create_stream(std::string_view name, StreamPriority priority) override {
    const StreamId id = ForwardingDevice::create_stream(name, priority);
    const std::scoped_lock lock(mutex_);
    if (name == name_) streams_.insert(id);
    return id;
  }
  void copy(std::byte* target, const std::byte* source, std::uint64_t size_bytes,
            StreamId stream) override {
    const bool fails = [&] {
      const std::scoped_lock lock(mutex_);
      return streams_.contains(stream) && left_-- == 0;
    }();
    if (fails) launch(stream, [] { throw std::runtime_error("the link to the device is down"); });
    ForwardingDevice::copy(target, source, size_bytes, stream);
  }

 private:
  const std::string name_;
  std::mutex mutex_;
  std::set<StreamId> streams_;  // guarded by mutex_
  int left_;                    // guarded by mutex_
};

class DurableDevice : public testing::Test {
 protected:
  Config config(const Case& placement) const {
    Config config = toy_config(directory_.path());
    placement.change(config);
    if (config.memory.host_bytes) *config.memory.host_bytes += 200_KiB;  // commit buffers
    config.storage.block_elements = 4096;
    config.storage.state = {.name = "run-7", .commit_every = 1};
    config.optimizer.clip_norm = 0;
    return config;
  }

  // Trains for four steps and closes. Returns the failure's text; empty: there was none.
  static std::string train(const Config& config, std::unique_ptr<HostDevice> device) {
    const ModelSpec model = toy_model();
    Engine engine(config, model, *device);
    try {
      (void)run_toy(engine, model, *device, config, {.steps = 4});
      engine.close();
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  }

  TempDirectory directory_;
};

class FailingDevice : public DurableDevice, public testing::WithParamInterface<const char*> {};

TEST_P(FailingDevice, LeavesTheStoreAtAStepThatIsWhole) {
  for (const Case& placement : kCases) {
    const Config with = config(placement);
    if (!placement.is_gpu) continue;
    SCOPED_TRACE(placement.name);
    const auto make_device = [&] {
      return make_host_device(
          {.memory_bytes = with.memory.device_bytes.value_or(64_MiB), .has_own_memory = true});
    };
    for (const int at : {0, 3, 7, 12, 17}) {
      SCOPED_TRACE(at);
      const std::string words =
          train(with, std::make_unique<FailingCopies>(make_device(), GetParam(), at));
      if (!words.empty()) {
        const ModelSpec model = toy_model();
        const auto device = make_device();
        Engine engine(with, model, *device);
        const std::uint64_t step = engine.committed_step().value_or(0);
        EXPECT_LT(step, 4u);
        const ToyResult result =
            run_toy(engine, model, *device, with, {.steps = static_cast<std::uint32_t>(6 - step)});
        EXPECT_TRUE(result.state == toy_oracle(with, {.steps = 6}).state) << words;
      }
      std::filesystem::remove_all(directory_.path());
      std::filesystem::create_directory(directory_.path());
    }
  }
}

// A block on the device may be at the next version before another one has passed its lane. Its save
// waits for the other one's.
TEST_F(DurableDevice, CommitsGoOnWhereUpdatesOnTheDeviceAreAhead) {
  for (const Case& placement : kCases) {
    if (!placement.is_gpu) continue;
    SCOPED_TRACE(placement.name);
    Config with = config(placement);
    with.optimizer.overlap = OverlapPolicy::kEager;
    const ModelSpec model = toy_model();
    const auto device = make_host_device(
        {.memory_bytes = with.memory.device_bytes.value_or(64_MiB), .has_own_memory = true});
    Engine engine(with, model, *device);
    const ToyResult result = run_toy(engine, model, *device, with, {.steps = 12});
    engine.close();
    EXPECT_EQ(engine.committed_step(), 12u);
    EXPECT_TRUE(result.state == toy_oracle(with, {.steps = 12}).state);
    std::filesystem::remove_all(directory_.path());
    std::filesystem::create_directory(directory_.path());
  }
}

// The only copies of a commit are those of close(). Without state on the device there are none.
TEST_F(DurableDevice, ACopyThatFailsIsNoCommit) {
  for (const Case& placement : kCases) {
    if (!placement.is_gpu || placement.name.ends_with("_streamed")) continue;
    SCOPED_TRACE(placement.name);
    Config with = config(placement);
    with.storage.state.commit_every = 100;
    const auto make_device = [&] {
      return make_host_device(
          {.memory_bytes = with.memory.device_bytes.value_or(64_MiB), .has_own_memory = true});
    };
    const std::string words =
        train(with, std::make_unique<FailingCopies>(make_device(), "commit", 1));
    EXPECT_NE(words.find("the link to the device is down; step 4 cannot be committed; the store "
                         "stays at step 0"),
              std::string::npos)
        << words;
    const ModelSpec model = toy_model();
    const auto device = make_device();
    Engine engine(with, model, *device);
    EXPECT_EQ(engine.committed_step(), 0u);
    EXPECT_TRUE(run_toy(engine, model, *device, with, {.steps = 2}).state ==
                toy_oracle(with, {.steps = 2}).state);
    std::filesystem::remove_all(directory_.path());
    std::filesystem::create_directory(directory_.path());
  }
}

INSTANTIATE_TEST_SUITE_P(At, FailingDevice,
                         testing::Values("commit", "optimizer on the device", "updates up",
                                         "updates down"));

}  // namespace
}  // namespace sluice::test
