// Test cases of DeviceGpt, the GPT for GPUs, on any device. The loss and the gradients must match
// the results of GptCompute on the CPU. Other tests compare GptCompute with a reference in double
// precision. A test program includes this header once and instantiates DeviceGptTest with
// device_gpt_cases() for the program's machines.
// Thread rule: one thread.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/tools/gpt/model/device_gpt_run.h"
#include "tests/tools/gpt/model/device_machine.h"
#include "tools/gpt/model/gpt_model.h"

namespace sluice::gpt {

struct DeviceGptCase {
  DeviceMachineFactory machine;
  const char* name;
  GptConfig config;
  BatchShape shape;
  std::uint64_t attention_scratch_bytes = kAttentionScratchBytes;
};

// No extent is a multiple of a lane count or of kPartialRows. In some cases, the rows are split
// into several pieces. Other cases have sequences that are shorter than the context, or attention
// that computes one head at a time.
inline std::vector<DeviceGptCase> device_gpt_cases(const DeviceMachineFactory& machine) {
  return {{machine,
           "tied",
           {.layers = 2,
            .heads = 3,
            .embedding = 12,
            .context = 7,
            .vocabulary = 13,
            .tied_head = true},
           {.batch = 2, .sequence = 5}},
          {machine,
           "untied",
           {.layers = 1,
            .heads = 2,
            .embedding = 10,
            .context = 9,
            .vocabulary = 17,
            .tied_head = false},
           {.batch = 3, .sequence = 9}},
          {machine,
           "long",
           {.layers = 2,
            .heads = 2,
            .embedding = 32,
            .context = 50,
            .vocabulary = 40,
            .tied_head = true},
           {.batch = 3, .sequence = 45}},
          {machine,
           "one_head_at_a_time",
           {.layers = 1,
            .heads = 3,
            .embedding = 24,
            .context = 8,
            .vocabulary = 30,
            .tied_head = true},
           {.batch = 2, .sequence = 8},
           1}};
}

inline std::string device_gpt_case_name(const testing::TestParamInfo<DeviceGptCase>& info) {
  return info.param.machine.name + "_" + info.param.name;
}

class DeviceGptTest : public testing::TestWithParam<DeviceGptCase> {
 protected:
  DeviceGptTest()
      : spec_(gpt_model_spec(GetParam().config)),
        tokens_(random_tokens("tokens", GetParam().shape.rows(), GetParam().config.vocabulary)),
        targets_(random_tokens("targets", GetParam().shape.rows(), GetParam().config.vocabulary)) {}

  void SetUp() override {
    if (const std::string why = GetParam().machine.why_not(); !why.empty()) GTEST_SKIP() << why;
  }

  // Returns random parameters. For bf16, the parameters are rounded. The CPU computes its result
  // from the same parameters.
  TensorMemory parameters(DType type) const {
    const TensorMemory values(spec_, DType::kFp32);
    fill_random(spec_, values);
    TensorMemory made(spec_, type);
    for_each_tensor(spec_, [&](std::size_t unit, std::size_t tensor, const TensorSpec& t) {
      for (std::uint64_t i = 0; i < t.element_count(); ++i) {
        const float value = values.floats(unit, tensor)[i];
        if (type == DType::kFp32) {
          made.floats(unit, tensor)[i] = value;
        } else {
          made.halves(unit, tensor)[i] = bf16_from_float(value);
        }
      }
    });
    return made;
  }
  PassResult on_cpu(DType type) const {
    GptCompute compute(
        GetParam().config, GetParam().shape,
        {.threads = 1, .precision = {.parameters = type, .gradients = DType::kFp32}});
    return run_training_pass(compute, spec_, parameters(type), DType::kFp32, tokens_, targets_);
  }
  PassResult on_device(DType type, DType gradient_type) const {
    const DeviceMachine machine = GetParam().machine.make(type, gradient_type);
    DeviceGpt gpt(GetParam().config, GetParam().shape, *machine.device, *machine.ops,
                  {.attention_scratch_bytes = GetParam().attention_scratch_bytes});
    EXPECT_GT(gpt.activation_bytes(), 0u);
    EXPECT_EQ(gpt.activation_bytes(),
              DeviceGpt::activation_bytes_of(
                  GetParam().config, GetParam().shape, type,
                  {.attention_scratch_bytes = GetParam().attention_scratch_bytes}));
    return run_device_pass(gpt, *machine.device, *machine.ops, spec_, parameters(type), tokens_,
                           targets_);
  }
  void expect_close(const PassResult& actual, const PassResult& expected, double tolerance) {
    EXPECT_NEAR(actual.loss, expected.loss, tolerance * expected.loss);
    ASSERT_EQ(actual.gradients.size(), expected.gradients.size());
    for (const auto& [name, gradient] : expected.gradients)
      EXPECT_LT(relative_difference(actual.gradients.at(name), gradient), tolerance) << name;
  }

  const ModelSpec spec_;
  const std::vector<std::uint32_t> tokens_;
  const std::vector<std::uint32_t> targets_;
};

TEST_P(DeviceGptTest, Fp32EqualsTheCpu) {
  expect_close(on_device(DType::kFp32, DType::kFp32), on_cpu(DType::kFp32), 2e-5);
}

// The comparison is coarse, because activations are rounded to 8 bits of mantissa at every step.
TEST_P(DeviceGptTest, Bf16IsNearTheCpu) {
  expect_close(on_device(DType::kBf16, DType::kFp32), on_cpu(DType::kBf16), 0.1);
}

TEST_P(DeviceGptTest, Bf16GradientsAreTheRoundedOnes) {
  const PassResult exact = on_device(DType::kBf16, DType::kFp32);
  const PassResult rounded = on_device(DType::kBf16, DType::kBf16);
  EXPECT_EQ(rounded.loss, exact.loss);
  for (const auto& [name, gradient] : exact.gradients) {
    // The gradients of tensors that are used twice are rounded twice.
    EXPECT_LT(relative_difference(rounded.gradients.at(name), gradient), 0.01) << name;
  }
}

TEST_P(DeviceGptTest, SecondPassOfTheSameObjectGivesTheSameBits) {
  const DeviceMachine machine = GetParam().machine.make(DType::kFp32, DType::kFp32);
  Device& device = *machine.device;
  DeviceGpt gpt(GetParam().config, GetParam().shape, device, *machine.ops);
  const TensorMemory values = parameters(DType::kFp32);
  const PassResult first =
      run_device_pass(gpt, device, *machine.ops, spec_, values, tokens_, targets_);
  (void)run_device_pass(gpt, device, *machine.ops, spec_, values, targets_, tokens_);
  const PassResult again =
      run_device_pass(gpt, device, *machine.ops, spec_, values, tokens_, targets_);
  EXPECT_EQ(first.loss, again.loss);
  for (const auto& [name, gradient] : first.gradients)
    EXPECT_EQ(again.gradients.at(name), gradient);
}

TEST_P(DeviceGptTest, EvaluationHasTheLossOfTraining) {
  const DeviceMachine machine = GetParam().machine.make(DType::kFp32, DType::kFp32);
  Device& device = *machine.device;
  DeviceGpt gpt(GetParam().config, GetParam().shape, device, *machine.ops);
  const Stream stream(device, "test");
  const std::vector<DeviceUnit> units =
      units_on_device(device, stream.id(), spec_, parameters(DType::kFp32), DType::kFp32);
  gpt.start_evaluation(tokens_, targets_);
  for (std::uint32_t use = 0; use < gpt.use_count(); ++use)
    gpt.forward(use, units[index_of(spec_.forward_order[use])].const_tensors(), stream.id());
  gpt.keep_loss(stream.id());
  const std::vector<double> losses = gpt.take_losses(stream.id());
  ASSERT_EQ(losses.size(), 1u);
  EXPECT_NEAR(losses.front(), on_cpu(DType::kFp32).loss, 1e-4);
  EXPECT_TRUE(gpt.take_losses(stream.id()).empty()) << "taken once";
}

TEST_P(DeviceGptTest, BatchesThatAreEvaluatedTogetherHaveTheirOwnLosses) {
  const DeviceMachine machine = GetParam().machine.make(DType::kFp32, DType::kFp32);
  Device& device = *machine.device;
  DeviceGpt gpt(GetParam().config, GetParam().shape, device, *machine.ops,
                {.attention_scratch_bytes = GetParam().attention_scratch_bytes});
  const std::uint32_t batches = gpt.evaluation_batches();
  ASSERT_GE(batches, 2u);
  const Stream stream(device, "test");
  const std::vector<DeviceUnit> units =
      units_on_device(device, stream.id(), spec_, parameters(DType::kFp32), DType::kFp32);
  const auto forward = [&](std::uint32_t use, std::uint32_t batch) {
    gpt.forward(use, units[index_of(spec_.forward_order[use])].const_tensors(), stream.id(),
                {.micro_batch = batch});
    if (use + 1 == gpt.use_count()) gpt.keep_loss(stream.id());
  };
  std::vector<std::vector<std::uint32_t>> tokens, targets;
  std::vector<double> alone;
  for (std::uint32_t batch = 0; batch < batches; ++batch) {
    const std::string name = std::to_string(batch);
    tokens.push_back(random_tokens(name.c_str(), tokens_.size(), GetParam().config.vocabulary));
    targets.push_back(
        random_tokens((name + "'").c_str(), tokens_.size(), GetParam().config.vocabulary));
    gpt.start_evaluation(tokens[batch], targets[batch]);
    for (std::uint32_t use = 0; use < gpt.use_count(); ++use) forward(use, 0);
    alone.push_back(gpt.take_losses(stream.id()).at(0));
  }
  for (std::uint32_t batch = 0; batch < batches; ++batch)
    gpt.start_evaluation(tokens[batch], targets[batch], batch);
  for (std::uint32_t use = 0; use < gpt.use_count(); ++use) {
    for (std::uint32_t batch = 0; batch < batches; ++batch) forward(use, batch);
  }
  EXPECT_EQ(gpt.take_losses(stream.id()), alone);
  EXPECT_NE(alone.front(), alone.back());
  const TensorMemory values = parameters(DType::kFp32);
  const PassResult after =
      run_device_pass(gpt, device, *machine.ops, spec_, values, tokens_, targets_);
  EXPECT_EQ(after.gradients, on_device(DType::kFp32, DType::kFp32).gradients);
}

// Three micro-batches are computed together, with checkpoints. The loss and the gradients of each
// micro-batch have the same bits as in a separate pass without checkpoints. The passes with
// checkpoints need less memory. Both compute as many heads at a time, because products of one head
// and of several may have other bits.
TEST_P(DeviceGptTest, CheckpointsChangeNoBit) {
  constexpr std::uint32_t kMicroBatches = 3;
  for (const DType type : {DType::kFp32, DType::kBf16}) {
    const DeviceMachine machine = GetParam().machine.make(type, DType::kFp32);
    Device& device = *machine.device;
    const TensorMemory values = parameters(type);
    std::vector<TrainingBatch> batches;
    std::vector<PassResult> expected;
    DeviceGpt keeping(GetParam().config, GetParam().shape, device, *machine.ops,
                      {.attention_scratch_bytes = GetParam().attention_scratch_bytes});
    for (std::uint32_t i = 0; i < kMicroBatches; ++i) {
      const std::string name = std::to_string(i);
      const std::uint32_t vocabulary = GetParam().config.vocabulary;
      batches.push_back({random_tokens(name.c_str(), tokens_.size(), vocabulary),
                         random_tokens((name + "'").c_str(), tokens_.size(), vocabulary)});
      expected.push_back(run_device_pass(keeping, device, *machine.ops, spec_, values,
                                         batches[i].tokens, batches[i].targets));
    }
    const DeviceGptOptions options{.checkpoints = Checkpoints::kUnits,
                                   .micro_batches = kMicroBatches,
                                   .attention_scratch_bytes = GetParam().attention_scratch_bytes};
    DeviceGpt gpt(GetParam().config, GetParam().shape, device, *machine.ops, options);
    EXPECT_EQ(gpt.activation_bytes(),
              DeviceGpt::activation_bytes_of(GetParam().config, GetParam().shape, type, options));
    EXPECT_LT(gpt.activation_bytes(), keeping.activation_bytes());
    gpt.warm_up();
    for (int again = 0; again < 2; ++again) {
      const std::vector<PassResult> actual =
          run_device_passes(gpt, device, *machine.ops, spec_, values, batches);
      for (std::uint32_t i = 0; i < kMicroBatches; ++i) {
        EXPECT_EQ(actual[i].loss, expected[i].loss) << i;
        EXPECT_EQ(actual[i].gradients, expected[i].gradients) << i;
      }
      EXPECT_NE(expected[0].loss, expected[1].loss);
      gpt.start_evaluation(tokens_, targets_);  // the following passes discard this evaluation
    }
  }
}

}  // namespace sluice::gpt
