// The declaration of the model and its initial values.
#include "tools/gpt/model/gpt_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include <sluice/error.h>
#include "tools/gpt/model/counter_random.h"

namespace sluice::gpt {
namespace {

std::vector<std::uint32_t> indexes(const std::vector<UnitId>& order) {
  std::vector<std::uint32_t> values;
  for (const UnitId unit : order) values.push_back(index_of(unit));
  return values;
}

TEST(GptModel, NamesShapesAndOrderOfATiedModel) {
  const GptConfig config{
      .layers = 2, .heads = 2, .embedding = 8, .context = 16, .vocabulary = 32, .tied_head = true};
  const ModelSpec spec = validated(gpt_model_spec(config));
  ASSERT_EQ(spec.units.size(), 4u);
  EXPECT_EQ(spec.units[0].tensors[kWte].name, "wte.weight");
  EXPECT_EQ(spec.units[0].tensors[kWpe].shape, (std::vector<std::uint64_t>{16, 8}));
  EXPECT_EQ(spec.units[1].name, "h.0");
  ASSERT_EQ(spec.units[2].tensors.size(), kBlockTensors);
  EXPECT_EQ(spec.units[2].tensors[kAttentionWeight].name, "h.1.attn.c_attn.weight");
  EXPECT_EQ(spec.units[2].tensors[kAttentionWeight].shape, (std::vector<std::uint64_t>{8, 24}));
  EXPECT_EQ(spec.units[2].tensors[kMlpProjectionWeight].name, "h.1.mlp.c_proj.weight");
  EXPECT_EQ(spec.units[3].tensors.size(), 2u);
  EXPECT_EQ(indexes(spec.forward_order), (std::vector<std::uint32_t>{0, 1, 2, 3, 0}));
  EXPECT_EQ(indexes(spec.backward_order), (std::vector<std::uint32_t>{0, 3, 2, 1, 0}));
  EXPECT_EQ(spec.concurrent_leases, 1u);
}

TEST(GptModel, UntiedModelHasItsOwnHead) {
  GptConfig config;
  config.tied_head = false;
  const ModelSpec spec = validated(gpt_model_spec(config));
  EXPECT_EQ(spec.units.back().tensors[kLmHeadWeight].name, "lm_head.weight");
  EXPECT_EQ(spec.forward_order.size(), spec.units.size());
}

// 124,439,808 parameters is the published size of GPT-2 small.
TEST(GptModel, HasTheSizeOfGpt2Small) {
  const GptConfig config{.layers = 12,
                         .heads = 12,
                         .embedding = 768,
                         .context = 1024,
                         .vocabulary = 50257,
                         .tied_head = true};
  EXPECT_EQ(gpt_model_spec(config).element_count(), 124'439'808u);
}

TEST(GptModel, DecaysMatricesOnly) {
  const ModelSpec spec = gpt_model_spec({});
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors)
      EXPECT_EQ(tensor.weight_decay == WeightDecay::kApply, tensor.shape.size() == 2)
          << tensor.name;
}

TEST(GptModel, RejectsBadShapesByName) {
  const auto message_of = [](const GptConfig& config) -> std::string {
    try {
      validate(config);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kConfig);
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message_of({}), "");
  EXPECT_EQ(message_of({.heads = 5}),
            "model.embedding is 192, which model.heads = 5 does not divide; use a multiple such as "
            "195, or another number of heads");
  EXPECT_NE(message_of({.layers = 0}).find("model.layers is 0"), std::string::npos);
  EXPECT_NE(message_of({.vocabulary = 1u << 30}).find("model.vocabulary"), std::string::npos);
}

TEST(GptModel, AnyRangeOfInitialValuesStandsAlone) {
  const GptConfig config;
  const TensorSpec tensor = gpt_model_spec(config).units[1].tensors[kAttentionWeight];
  std::vector<float> whole(tensor.element_count());
  fill_initial_values(config, 42, tensor, 0, whole);
  for (const std::uint64_t begin : {0u, 1u, 255u, 1000u}) {
    std::vector<float> part(777);
    fill_initial_values(config, 42, tensor, begin, part);
    EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + static_cast<long>(begin)));
  }
  std::vector<float> other_seed(whole.size());
  fill_initial_values(config, 43, tensor, 0, other_seed);
  EXPECT_NE(whole, other_seed);
}

TEST(GptModel, InitialValuesFollowGpt2) {
  const GptConfig config;
  const ModelSpec spec = gpt_model_spec(config);
  std::set<float> firsts;
  for (const UnitSpec& unit : spec.units) {
    for (const TensorSpec& tensor : unit.tensors) {
      std::vector<float> values(tensor.element_count());
      fill_initial_values(config, 1, tensor, 0, values);
      double sum = 0, squares = 0;
      for (const float v : values) sum += v, squares += static_cast<double>(v) * v;
      const double count = static_cast<double>(values.size());
      if (tensor.shape.size() == 1) {
        const bool is_bias = tensor.name.ends_with("bias");
        EXPECT_EQ(sum, is_bias ? 0.0 : count) << tensor.name;
        continue;
      }
      const bool residual = tensor.name.ends_with("c_proj.weight");
      const double deviation = residual ? 0.02 / std::sqrt(12.0) : 0.02;
      EXPECT_NEAR(sum / count / deviation, 0.0, 5 / std::sqrt(count)) << tensor.name;
      EXPECT_NEAR(std::sqrt(squares / count) / deviation, 1.0, 5 / std::sqrt(count)) << tensor.name;
      EXPECT_TRUE(firsts.insert(values[0]).second) << tensor.name << " repeats another tensor";
    }
  }
}

TEST(CounterRandom, KnownValues) {
  // From the same definition in Python (tests/golden/twin.py): a change breaks every saved run.
  const CounterRandom random(42, "wte.weight");
  EXPECT_EQ(random.bits(0), 0xab15f640e2c2fcafu);
  EXPECT_EQ(random.bits(1'000'000), 0xd0f9c702424d5e2eu);
  EXPECT_DOUBLE_EQ(random.normal(5), 0.3578463668288204);
}

}  // namespace
}  // namespace sluice::gpt
