// Test cases of training with an engine, on any device. The losses must match the losses on the
// CPU. The bits of the results must not depend on the placement of the state. A test program
// includes this header once and instantiates GpuTrainerTest with the program's machines. Thread
// rule: one thread.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <string>
#include <vector>

#include "tests/support/temp_directory.h"
#include "tests/tools/gpt/model/device_machine.h"
#include "tests/tools/gpt/train/small_gpt.h"
#include "tools/gpt/train/gpu_trainer.h"
#include "tools/gpt/train/host_trainer.h"
#include "tools/report/state_hash.h"

namespace sluice {

class GpuTrainerTest : public testing::TestWithParam<gpt::DeviceMachineFactory> {
 protected:
  static constexpr std::uint64_t kSteps = 10;

  struct Result {
    std::vector<double> losses;
    std::vector<double> gradient_norms;
    double validation_loss = 0;
    std::string state;
  };

  void SetUp() override {
    if (const std::string why = GetParam().why_not(); !why.empty()) GTEST_SKIP() << why;
    std::ofstream text(folder_.file("text"));
    for (int i = 0; i < 3000; ++i) text << static_cast<char>('a' + i * i % 7 + i % 3);
  }

  TrainConfig config(DType precision) const {
    TrainConfig made = test::small_train_config(folder_.path(), precision);
    made.data_file = folder_.file("text");
    made.micro_batches = 2;
    return made;
  }

  static Result run(Trainer& trainer, Engine& engine, const Dataset& dataset) {
    Result result;
    for (std::uint64_t step = 0; step < kSteps; ++step) {
      const TrainedStep trained = trainer.train_step(step);
      result.losses.push_back(trained.loss);
      result.gradient_norms.push_back(trained.report.gradient_norm);
    }
    // Two sequences in a batch: the last batch has only one.
    result.validation_loss = trainer.evaluate(dataset.validation_batches(5));
    engine.drain();
    result.state = state_sha256(engine);
    return result;
  }

  Result on_cpu(const TrainConfig& config) const {
    const Dataset dataset(config);
    test::SmallGpt small(config);
    small.engine().initialize(small.initial_values());
    HostTrainer trainer(small.config(), dataset, small.engine(), small.device());
    return run(trainer, small.engine(), dataset);
  }

  Result on_machine(const TrainConfig& config) const {
    const Dataset dataset(config);
    const gpt::DeviceMachine machine =
        GetParam().make(config.engine.precision.parameters, config.engine.precision.gradients);
    gpt::DeviceGpt model(config.model,
                         {.batch = config.sequences, .sequence = config.model.context},
                         *machine.device, *machine.ops, gpu_options(config));
    const test::SmallGpt values(config);  // only for its initial values
    Engine engine(config.engine, validated(training_model(config, /*is_on_host=*/false)),
                  *machine.device);
    engine.initialize(values.initial_values());
    GpuTrainer trainer(config, dataset, engine, *machine.device, model);
    return run(trainer, engine, dataset);
  }

  test::TempDirectory folder_;
};

inline std::string device_machine_name(
    const testing::TestParamInfo<gpt::DeviceMachineFactory>& info) {
  return info.param.name;
}

TEST_P(GpuTrainerTest, Fp32TrainsAsTheCpu) {
  const TrainConfig fp32 = config(DType::kFp32);
  const Result actual = on_machine(fp32);
  const Result expected = on_cpu(fp32);
  for (std::uint64_t step = 0; step < kSteps; ++step) {
    EXPECT_NEAR(actual.losses[step], expected.losses[step], 1e-4 * expected.losses[step]) << step;
    EXPECT_NEAR(actual.gradient_norms[step], expected.gradient_norms[step],
                1e-4 * expected.gradient_norms[step])
        << step;
  }
  EXPECT_LT(actual.losses.back(), actual.losses.front()) << "it must learn";
  EXPECT_NEAR(actual.validation_loss, expected.validation_loss, 1e-4 * expected.validation_loss);
}

TEST_P(GpuTrainerTest, Bf16TrainsNearTheCpu) {
  const TrainConfig bf16 = config(DType::kBf16);
  const Result actual = on_machine(bf16);
  const Result expected = on_cpu(bf16);
  for (std::uint64_t step = 0; step < kSteps; ++step)
    EXPECT_NEAR(actual.losses[step], expected.losses[step], 0.05 * expected.losses[step]) << step;
  EXPECT_LT(actual.losses.back(), actual.losses.front()) << "it must learn";
}

TEST_P(GpuTrainerTest, PlacementChangesNoBit) {
  for (const DType precision : {DType::kBf16, DType::kFp32}) {
    TrainConfig on_nvme = config(precision);
    TrainConfig in_memory = on_nvme;
    in_memory.engine.placement = {.parameters = TierChoice::kDevice,
                                  .optimizer = TierChoice::kHost};
    in_memory.engine.optimizer.overlap = OverlapPolicy::kSerial;
    TrainConfig mixed = on_nvme;
    mixed.engine.placement = {.parameters = TierChoice::kHost, .optimizer = TierChoice::kNvme};
    mixed.engine.storage.block_elements = 8192;
    TrainConfig on_device = on_nvme;  // the device makes the update
    on_device.engine.placement = {.optimizer = TierChoice::kDevice};
    TrainConfig partly_on_device = on_nvme;  // the device has as much state as its budget allows
    partly_on_device.engine.placement = {};
    partly_on_device.engine.memory.device_bytes = 1_MiB;
    const Result reference = on_machine(in_memory);
    TrainConfig scaled = in_memory;  // a scale that is a power of two must change no bit
    scaled.engine.precision.loss_scale.static_scale = 1024;
    for (const TrainConfig& other : {on_nvme, mixed, scaled, on_device, partly_on_device}) {
      const Result actual = on_machine(other);
      EXPECT_EQ(actual.losses, reference.losses) << name_of(precision);
      EXPECT_EQ(actual.gradient_norms, reference.gradient_norms) << name_of(precision);
      EXPECT_EQ(actual.validation_loss, reference.validation_loss) << name_of(precision);
      EXPECT_EQ(actual.state, reference.state) << name_of(precision);
    }
  }
}

// The engine has 140 KiB of device memory. This memory holds two units at a time. The whole state
// has 1.4 MiB.
TEST_P(GpuTrainerTest, TrainsWhatDoesNotFitTheDeviceBudget) {
  TrainConfig small = config(DType::kBf16);
  small.engine.memory.device_bytes = 1_MiB;
  const Result reference = on_machine(small);
  small.engine.memory.device_bytes = 140_KiB;
  EXPECT_EQ(on_machine(small).state, reference.state);
}

// The engine keeps the values between units in device memory, in host memory or on storage. In
// vertical order, each unit processes all micro-batches before the next unit begins. If the head is
// not tied, both orders give the same bits.
TEST_P(GpuTrainerTest, ActivationsElsewhereChangeNoBit) {
  for (const DType precision : {DType::kBf16, DType::kFp32}) {
    TrainConfig keeping = config(precision);
    keeping.model.tied_head = false;
    keeping.micro_batches = 3;
    const Result reference = on_machine(keeping);
    for (const ActivationHome home :
         {ActivationHome::kRecompute, ActivationHome::kHost, ActivationHome::kNvme}) {
      for (const MicroBatchOrder order :
           {MicroBatchOrder::kHorizontal, MicroBatchOrder::kVertical}) {
        TrainConfig other = keeping;
        other.order = order;
        other.engine.activations = {.home = home, .micro_batches = 3, .order = order};
        const Result actual = on_machine(other);
        EXPECT_EQ(actual.losses, reference.losses) << name_of(home) << name_of(order);
        EXPECT_EQ(actual.gradient_norms, reference.gradient_norms) << name_of(home);
        EXPECT_EQ(actual.validation_loss, reference.validation_loss) << name_of(home);
        EXPECT_EQ(actual.state, reference.state) << name_of(home) << name_of(order);
      }
    }
  }
}

}  // namespace sluice
