// The whole model with bf16 factors: near the fp32 computation on the same values, and the promises
// about bits (threads, addresses).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tests/tools/gpt/model/model_state.h"
#include "tools/gpt/model/gpt_compute.h"

namespace sluice::gpt {
namespace {

constexpr BatchShape kShape{.batch = 3, .sequence = 90};

GptConfig config_of(bool tied_head) {
  return {.layers = 2,
          .heads = 2,
          .embedding = 64,
          .context = 96,
          .vocabulary = 101,
          .tied_head = tied_head};
}

class Bf16Model : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    const OneDnn& library = OneDnn::library();
    if (!library.why_not().empty()) GTEST_SKIP() << "no oneDNN: " << library.why_not();
    if (library.family() < KernelFamily::kAvx512Bf16)
      GTEST_SKIP() << "no bf16 kernels: " << name_of(library.family());
  }

  PassResult run(MatmulChoice matmul, unsigned threads, DType gradients = DType::kBf16,
                 std::uint64_t shift = 0) const {
    const GptConfig config = config_of(GetParam());
    const ModelSpec spec = gpt_model_spec(config);
    const TensorMemory wide(spec, DType::kFp32);
    fill_random(spec, wide);
    const TensorMemory narrow(spec, DType::kBf16, shift);
    for_each_tensor(spec, [&](std::size_t unit, std::size_t tensor, const TensorSpec& t) {
      // Matrices of a size that trained ones have: softmax in its bends would amplify any rounding.
      const float size = t.shape.size() > 1 ? 0.25f : 1.0f;
      for (std::uint64_t i = 0; i < t.element_count(); ++i)
        narrow.halves(unit, tensor)[i] = bf16_from_float(size * wide.floats(unit, tensor)[i]);
    });
    GptCompute compute(
        config, kShape,
        {.threads = threads, .precision = {DType::kBf16, gradients}, .matmul = matmul});
    const PassResult result = run_training_pass(
        compute, spec, narrow, gradients, random_tokens("tokens", kShape.rows(), config.vocabulary),
        random_tokens("targets", kShape.rows(), config.vocabulary), shift);
    const MatrixWork work = compute.matrix_work();
    EXPECT_EQ(matmul.bf16_factors ? work.openblas : work.onednn, 0u);
    EXPECT_GT(work.openblas + work.onednn, 0u);
    return result;
  }
  static constexpr MatmulChoice kBf16{.library = MatrixLibrary::kOneDnn, .bf16_factors = true};
};
INSTANTIATE_TEST_SUITE_P(TiedHead, Bf16Model, testing::Bool());

// Each factor is rounded by 2^-9 at most, independently: the deviation of a sum over many is of
// that order, and that of an element of the gradient stays below a twentieth of its tensor's
// largest.
TEST_P(Bf16Model, StaysNearTheFp32Computation) {
  const PassResult expected = run({}, 2, DType::kFp32);
  for (const DType gradients : {DType::kFp32, DType::kBf16}) {
    const PassResult result = run(kBf16, 2, gradients);
    EXPECT_NEAR(result.loss, expected.loss, 4e-3 * expected.loss);
    EXPECT_NE(result.loss, expected.loss);
    ASSERT_EQ(result.gradients.size(), expected.gradients.size());
    for (const auto& [name, values] : expected.gradients) {
      float largest = 0;
      double error = 0, norm = 0;
      for (const float value : values) largest = std::max(largest, std::abs(value));
      for (std::size_t i = 0; i < values.size(); ++i) {
        const double difference = static_cast<double>(result.gradients.at(name)[i]) - values[i];
        ASSERT_LE(std::abs(difference), 0.05 * largest) << name << " " << i;
        error += difference * difference;
        norm += static_cast<double>(values[i]) * values[i];
      }
      EXPECT_LT(std::sqrt(error), 0.02 * std::sqrt(norm)) << name;
    }
  }
}

TEST_P(Bf16Model, ThreadsAndAddressesChangeNoBit) {
  const PassResult one = run(kBf16, 1);
  for (const unsigned threads : {2u, 3u}) {
    const PassResult many = run(kBf16, threads, DType::kBf16, threads);
    EXPECT_EQ(one.loss, many.loss);
    EXPECT_EQ(one.gradients, many.gradients) << threads;
  }
}

TEST_P(Bf16Model, MemoryIsKnownBefore) {
  const GptComputeOptions options{
      .threads = 2, .precision = {DType::kBf16, DType::kBf16}, .matmul = kBf16};
  EXPECT_EQ(GptCompute::activation_bytes_of(config_of(GetParam()), kShape, options),
            GptCompute(config_of(GetParam()), kShape, options).activation_bytes());
}

}  // namespace
}  // namespace sluice::gpt
