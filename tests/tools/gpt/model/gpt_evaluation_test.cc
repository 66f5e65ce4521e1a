// Evaluations of several batches at the same time: the losses are those of each batch alone, and
// the values take no memory of their own.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/tools/gpt/model/model_state.h"
#include "tools/gpt/model/gpt_compute.h"
#include "tools/gpt/model/gpt_model.h"

namespace sluice::gpt {
namespace {

constexpr BatchShape kOddShape{.batch = 2, .sequence = 5};

class EvaluationsTogether : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(TiedHead, EvaluationsTogether, testing::Bool());

// As many batches as there is room for; each use by all of them, then the next use.
TEST_P(EvaluationsTogether, HaveTheLossOfEachBatchAlone) {
  const GptConfig config{.layers = 2,
                         .heads = 3,
                         .embedding = 12,
                         .context = 7,
                         .vocabulary = 13,
                         .tied_head = GetParam()};
  const ModelSpec spec = gpt_model_spec(config);
  const TensorMemory parameters(spec, DType::kFp32);
  fill_random(spec, parameters);
  const auto targets = random_tokens("targets", kOddShape.rows(), config.vocabulary);
  for (const Checkpoints checkpoints : {Checkpoints::kNone, Checkpoints::kUnits}) {
    const GptComputeOptions options{.threads = 2, .checkpoints = checkpoints};
    GptCompute alone(config, kOddShape, options);
    GptCompute together(config, kOddShape, options);
    const std::uint32_t batches = together.evaluation_batches();
    ASSERT_GE(batches, 2u);
    std::vector<std::vector<std::uint32_t>> tokens;
    std::vector<double> losses;
    for (std::uint32_t batch = 0; batch < batches; ++batch) {
      const std::string name = std::to_string(batch);
      tokens.push_back(random_tokens(name.c_str(), kOddShape.rows(), config.vocabulary));
      alone.start_evaluation(tokens[batch], targets);
      run_forward(alone, spec, parameters);
      losses.push_back(alone.loss());
    }
    EXPECT_NE(losses.front(), losses.back());
    for (std::uint32_t batch = 0; batch < batches; ++batch)
      together.start_evaluation(tokens[batch], targets, batch);
    for (std::uint32_t use = 0; use < together.use_count(); ++use) {
      for (std::uint32_t batch = 0; batch < batches; ++batch) {
        together.forward(use, parameters.const_pointers(index_of(spec.forward_order[use])),
                         {.micro_batch = batch});
        if (use + 1 == together.use_count()) {
          EXPECT_EQ(together.loss(), losses[batch]) << batch << " of " << batches;
        }
      }
    }
    if (checkpoints == Checkpoints::kUnits) continue;
    GptCompute fresh(config, kOddShape, options);
    const auto train = [&](GptCompute& compute) {
      return run_training_pass(compute, spec, parameters, DType::kFp32, tokens[0], targets);
    };
    EXPECT_EQ(train(together).gradients, train(fresh).gradients) << "they leave no trace";
  }
}

// Values of [rows, width], of which a block keeps 16.
TEST(Evaluation, TakesMoreBatchesWhereThereAreMoreLayers) {
  const auto batches_of = [](std::uint32_t layers, Checkpoints checkpoints) {
    const GptConfig config{.layers = layers};
    const BatchShape shape{.batch = 2, .sequence = 64};
    const GptComputeOptions options{.threads = 1, .checkpoints = checkpoints};
    const GptCompute compute(config, shape, options);
    EXPECT_EQ(compute.activation_bytes(), GptCompute::activation_bytes_of(config, shape, options));
    return compute.evaluation_batches();
  };
  EXPECT_EQ(batches_of(2, Checkpoints::kUnits), 5u);
  EXPECT_EQ(batches_of(9, Checkpoints::kUnits), 5u);
  EXPECT_GE(batches_of(1, Checkpoints::kNone), 7u);
  EXPECT_GE(batches_of(9, Checkpoints::kNone), 7u + 8 * 16);
}

}  // namespace
}  // namespace sluice::gpt
