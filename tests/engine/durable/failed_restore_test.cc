// A durable store whose state a restore() was to replace, but the source has failed on the way. The
// store still holds its commit, and training continues from there.
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "tests/engine/exactness_cases.h"
#include "tests/support/expect_error.h"
#include "tests/support/memory_source.h"
#include "tests/support/same_training.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

// Gives its values until it comes to one tensor, as a checkpoint with a damaged file does.
class BreakingSource final : public StateSource {
 public:
  // `whole` must outlive the source.
  BreakingSource(StateSource& whole, std::string damaged)
      : whole_(whole), damaged_(std::move(damaged)) {}

  StatePosition position() const override { return whole_.position(); }
  void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first_element,
            std::span<float> values) override {
    if (tensor.name == damaged_) throw Error(ErrorCode::kDamaged, damaged_ + " is damaged");
    whole_.read(tensor, kind, first_element, values);
  }

 private:
  StateSource& whole_;
  const std::string damaged_;
};

class FailedRestore : public testing::TestWithParam<Case> {
 protected:
  FailedRestore() {
    config_ = toy_config(directory_.path());
    GetParam().change(config_);
    if (config_.memory.host_bytes) *config_.memory.host_bytes += 200_KiB;  // commit buffers
    config_.storage.block_elements = 4096;
    config_.storage.state = {.name = "run-7", .commit_every = 1};
    config_.optimizer.clip_norm = 0;
  }

  std::unique_ptr<HostDevice> device() const {
    return make_host_device({.memory_bytes = config_.memory.device_bytes.value_or(64_MiB),
                             .has_own_memory = GetParam().is_gpu});
  }
  ToyResult train(std::uint32_t steps) const {
    const auto own = device();
    Engine engine(config_, model_, *own);
    ToyResult result = run_toy(engine, model_, *own, config_, {.steps = steps});
    engine.close();
    return result;
  }

  TempDirectory directory_;
  const ModelSpec model_ = toy_model();
  Config config_;
};

TEST_P(FailedRestore, LeavesTheCommit) {
  (void)train(2);
  Config scratch = config_;
  scratch.storage.state = {};
  const auto other_device = device();
  Engine other(scratch, model_, *other_device);
  (void)run_toy(other, model_, *other_device, scratch, {.steps = 5});
  MemorySource newer(other);
  BreakingSource source(newer, model_.units.back().tensors.back().name);
  {
    const auto own = device();
    Engine engine(config_, model_, *own);
    expect_error(ErrorCode::kDamaged, [&] { engine.restore(source, "behind step 5"); });
    const OpenedState opened = engine.open_or_create(toy_values());
    EXPECT_EQ(opened.step, 2u);
    EXPECT_EQ(opened.application, "behind step 2");
    const Stream stream(*own, "compute");
    Step step = engine.begin_step({.learning_rate = ToyOptions().learning_rate});
    walk_step(step, model_, engine, *own, stream, config_, 1);
    EXPECT_EQ(step.finish().step, 3u);  // without a text: the one before stays
    engine.close();
  }
  {
    const auto own = device();
    Engine engine(config_, model_, *own);
    EXPECT_EQ(engine.open_or_create(toy_values()).application, "behind step 2");
    EXPECT_TRUE(read_state(engine) == toy_oracle(config_, {.steps = 3}).state);
  }
}

INSTANTIATE_TEST_SUITE_P(All, FailedRestore,
                         testing::Values(kCases[0], kCases[1], kCases[2], kCases[3], kCases[4]),
                         [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace sluice::test
