// The GPT for GPUs, its kernel bodies run on the host device: the same loss and gradients as the
// CPU's GptCompute, which is held to a reference in double.
#include "tools/gpt/device_gpt.h"

#include <gtest/gtest.h>

#include <cmath>

#include "gpu/host_launch.h"
#include "tests/tools/gpt/device_gpt_run.h"
#include "tools/gpt/device_ops_over.h"
#include "tools/gpt/gpt_model.h"

namespace sluice::gpt {
namespace {

using HostOps = DeviceOpsOver<HostLauncher>;

struct Case {
  const char* name;
  GptConfig config;
  BatchShape shape;
  std::uint64_t attention_scratch_bytes = kAttentionScratchBytes;
};

// No extent is a multiple of a lane count or of kPartialRows; several pieces of rows, sequences
// shorter than the context, and one head at a time.
const Case kCases[] = {
    {"tied",
     {.layers = 2, .heads = 3, .embedding = 12, .context = 7, .vocabulary = 13, .tied_head = true},
     {.batch = 2, .sequence = 5}},
    {"untied",
     {.layers = 1, .heads = 2, .embedding = 10, .context = 9, .vocabulary = 17, .tied_head = false},
     {.batch = 3, .sequence = 9}},
    {"long",
     {.layers = 2, .heads = 2, .embedding = 32, .context = 50, .vocabulary = 40, .tied_head = true},
     {.batch = 3, .sequence = 45}},
    {"one_head_at_a_time",
     {.layers = 1, .heads = 3, .embedding = 24, .context = 8, .vocabulary = 30, .tied_head = true},
     {.batch = 2, .sequence = 8},
     1}};

std::string case_name(const testing::TestParamInfo<Case>& info) {
  return info.param.name;
}

class DeviceGptOnHost : public testing::TestWithParam<Case> {
 protected:
  DeviceGptOnHost()
      : spec_(gpt_model_spec(GetParam().config)),
        tokens_(random_tokens("tokens", GetParam().shape.rows(), GetParam().config.vocabulary)),
        targets_(random_tokens("targets", GetParam().shape.rows(), GetParam().config.vocabulary)) {}

  // Random parameters, in bf16 rounded, and the result of the CPU from the same ones.
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
  PassResult on_device(DType type, DType gradient_type) {
    HostOps ops(HostLauncher(*device_), type, gradient_type);
    DeviceGpt gpt(GetParam().config, GetParam().shape, *device_, ops,
                  GetParam().attention_scratch_bytes);
    EXPECT_GT(gpt.activation_bytes(), 0u);
    return run_device_pass(gpt, *device_, ops, spec_, parameters(type), tokens_, targets_);
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
  const std::unique_ptr<HostDevice> device_ = make_host_device({.memory_bytes = 256_MiB});
};

INSTANTIATE_TEST_SUITE_P(Shapes, DeviceGptOnHost, testing::ValuesIn(kCases), case_name);

TEST_P(DeviceGptOnHost, Fp32EqualsTheCpu) {
  expect_close(on_device(DType::kFp32, DType::kFp32), on_cpu(DType::kFp32), 2e-5);
}

// Activations are rounded to 8 bits of mantissa at every step: a coarse comparison.
TEST_P(DeviceGptOnHost, Bf16IsNearTheCpu) {
  expect_close(on_device(DType::kBf16, DType::kFp32), on_cpu(DType::kBf16), 0.1);
}

TEST_P(DeviceGptOnHost, Bf16GradientsAreTheRoundedOnes) {
  const PassResult exact = on_device(DType::kBf16, DType::kFp32);
  const PassResult rounded = on_device(DType::kBf16, DType::kBf16);
  EXPECT_EQ(rounded.loss, exact.loss);
  for (const auto& [name, gradient] : exact.gradients) {
    // Tensors that are used twice are rounded twice.
    EXPECT_LT(relative_difference(rounded.gradients.at(name), gradient), 0.01) << name;
  }
}

TEST_P(DeviceGptOnHost, SecondPassOfTheSameObjectGivesTheSameBits) {
  HostOps ops(HostLauncher(*device_), DType::kFp32, DType::kFp32);
  DeviceGpt gpt(GetParam().config, GetParam().shape, *device_, ops);
  const TensorMemory values = parameters(DType::kFp32);
  const PassResult first = run_device_pass(gpt, *device_, ops, spec_, values, tokens_, targets_);
  (void)run_device_pass(gpt, *device_, ops, spec_, values, targets_, tokens_);
  const PassResult again = run_device_pass(gpt, *device_, ops, spec_, values, tokens_, targets_);
  EXPECT_EQ(first.loss, again.loss);
  for (const auto& [name, gradient] : first.gradients)
    EXPECT_EQ(again.gradients.at(name), gradient);
}

TEST_P(DeviceGptOnHost, EvaluationHasTheLossOfTraining) {
  HostOps ops(HostLauncher(*device_), DType::kFp32, DType::kFp32);
  DeviceGpt gpt(GetParam().config, GetParam().shape, *device_, ops);
  const TensorMemory values = parameters(DType::kFp32);
  const Stream stream(*device_, "test");
  gpt.start(DeviceGpt::Mode::kEvaluation, tokens_, targets_, stream.id());
  for (std::uint32_t use = 0; use < gpt.use_count(); ++use)
    gpt.forward(use, values.const_pointers(index_of(spec_.forward_order[use])), stream.id());
  double loss = 1.0;  // is added to
  gpt.add_loss(loss, stream.id());
  device_->synchronize(stream.id());
  EXPECT_NEAR(loss - 1.0, on_cpu(DType::kFp32).loss, 1e-4);
}

TEST(DeviceGpt, RefusesForeignTokensAndTypes) {
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  HostOps ops(HostLauncher(*device), DType::kFp32, DType::kFp32);
  const GptConfig config{
      .layers = 1, .heads = 1, .embedding = 8, .context = 4, .vocabulary = 5, .tied_head = true};
  DeviceGpt gpt(config, {.batch = 1, .sequence = 4}, *device, ops);
  const Stream stream(*device, "test");
  const std::vector<std::uint32_t> good{0, 1, 2, 4};
  const std::vector<std::uint32_t> bad{0, 1, 5, 4};
  EXPECT_THROW(gpt.start(DeviceGpt::Mode::kTraining, bad, good, stream.id()), Error);
  EXPECT_THROW(gpt.start(DeviceGpt::Mode::kTraining, good, bad, stream.id()), Error);
  EXPECT_THROW(DeviceGpt(config, {.batch = 1, .sequence = 5}, *device, ops), Error);
  EXPECT_THROW(HostOps(HostLauncher(*device), DType::kFp16, DType::kFp16), Error);
  EXPECT_THROW(HostOps(HostLauncher(*device), DType::kFp32, DType::kBf16), Error);
}

}  // namespace
}  // namespace sluice::gpt
