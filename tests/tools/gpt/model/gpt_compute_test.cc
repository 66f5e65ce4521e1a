// The whole model: loss, logits and every gradient against the double reference, and the promises
// about bits (threads, addresses, bf16 at rest).
#include "tools/gpt/model/gpt_compute.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include <sluice/error.h>
#include "tests/tools/gpt/model/model_state.h"
#include "tests/tools/gpt/model/reference_gpt.h"

namespace sluice::gpt {
namespace {

using reference::Vector;

// Small enough for a difference per parameter; no extent is a multiple of the 16 lanes.
GptConfig small_config(bool tied_head) {
  return {.layers = 2,
          .heads = 3,
          .embedding = 12,
          .context = 7,
          .vocabulary = 13,
          .tied_head = tied_head};
}
constexpr BatchShape kSmallShape{.batch = 2, .sequence = 5};

GptConfig medium_config() {
  return {.layers = 2,
          .heads = 2,
          .embedding = 64,
          .context = 96,
          .vocabulary = 100,
          .tied_head = true};
}
constexpr BatchShape kMediumShape{.batch = 3, .sequence = 90};

struct Model {
  GptConfig config;
  BatchShape shape;
  ModelSpec spec;
  TensorMemory parameters;
  std::vector<std::uint32_t> tokens, targets;

  Model(const GptConfig& c, BatchShape s, std::uint64_t shift = 0)
      : config(c), shape(s), spec(gpt_model_spec(c)), parameters(spec, DType::kFp32, shift) {
    fill_random(spec, parameters);
    tokens = random_tokens("tokens", shape.rows(), config.vocabulary);
    targets = random_tokens("targets", shape.rows(), config.vocabulary);
  }

  reference::Parameters reference_parameters() const {
    reference::Parameters values;
    for_each_tensor(spec, [&](std::size_t unit, std::size_t tensor, const TensorSpec& t) {
      const float* data = parameters.floats(unit, tensor);
      values[t.name] = Vector(data, data + t.element_count());
    });
    return values;
  }

  PassResult run(unsigned threads, std::uint64_t shift = 0) const {
    GptCompute compute(config, shape, {.threads = threads});
    return run_training_pass(compute, spec, parameters, DType::kFp32, tokens, targets, shift);
  }
};

class WholeModel : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(TiedHead, WholeModel, testing::Bool());

TEST_P(WholeModel, LossAndEveryGradientEqualTheReference) {
  const Model model(small_config(GetParam()), kSmallShape);
  const PassResult result = model.run(2);
  reference::Parameters parameters = model.reference_parameters();
  const auto loss = [&] {
    return reference::cross_entropy(
        reference::logits(model.config, parameters, model.tokens, model.shape.sequence),
        model.targets);
  };
  EXPECT_NEAR(result.loss, loss(), 1e-6);
  ASSERT_EQ(result.gradients.size(), parameters.size());
  for (auto& [name, values] : parameters) {
    Vector expected;
    for (double& value : values) expected.push_back(reference::central_difference(&value, loss));
    // fp32 rounding of sums over 10 tokens and two layers; the differences are good to 1e-9.
    EXPECT_LT(relative_difference(result.gradients.at(name), expected), 3e-6) << name;
  }
}

TEST_P(WholeModel, EvaluationGivesTheLossAndGenerationTheLogits) {
  const Model model(small_config(GetParam()), kSmallShape);
  GptCompute compute(model.config, model.shape, {.threads = 2});
  const reference::Parameters parameters = model.reference_parameters();
  compute.start_evaluation(model.tokens, model.targets);
  run_forward(compute, model.spec, model.parameters);
  EXPECT_NEAR(compute.loss(),
              reference::cross_entropy(
                  reference::logits(model.config, parameters, model.tokens, model.shape.sequence),
                  model.targets),
              1e-6);

  for (std::size_t length = 1; length <= kSmallShape.sequence; ++length) {
    const std::vector<std::uint32_t> prompt(model.tokens.begin(),
                                            model.tokens.begin() + static_cast<long>(length));
    compute.start_generation(prompt);
    run_forward(compute, model.spec, model.parameters);
    const Vector logits = reference::logits(model.config, parameters, prompt, length);
    const Vector last(logits.end() - model.config.vocabulary, logits.end());
    EXPECT_LT(relative_difference(compute.last_logits(), last), 2e-6) << length;
  }
  // A generation in between leaves no trace in the next training pass.
  const PassResult after = run_training_pass(compute, model.spec, model.parameters, DType::kFp32,
                                             model.tokens, model.targets);
  EXPECT_EQ(after.gradients, model.run(2).gradients);
}

// 90 tokens span two blocks of queries and give every product several tiles.
TEST(GptCompute, ThreadsChangeNoBit) {
  const Model model(medium_config(), kMediumShape);
  const PassResult one = model.run(1);
  for (const unsigned threads : {2u, 3u}) {
    const PassResult many = model.run(threads);
    EXPECT_EQ(one.loss, many.loss);
    EXPECT_EQ(one.gradients, many.gradients) << threads;
  }
}

TEST(GptCompute, AddressesThatAreMultiplesOf256ChangeNoBit) {
  const PassResult expected = Model(medium_config(), kMediumShape).run(2);
  for (std::uint64_t shift = 1; shift < 16; shift += 2) {
    const PassResult moved = Model(medium_config(), kMediumShape, shift).run(2, 16 - shift);
    EXPECT_EQ(expected.loss, moved.loss);
    EXPECT_EQ(expected.gradients, moved.gradients) << shift;
  }
}

// bf16 or fp16 at rest means: the same fp32 computation on its values, gradients rounded once.
void expect_fp32_of_values_rounded(bool is_tied, DType dtype) {
  Model model(small_config(is_tied), kSmallShape);
  const TensorMemory narrow(model.spec, dtype);
  for_each_tensor(model.spec, [&](std::size_t unit, std::size_t tensor, const TensorSpec& t) {
    for (std::uint64_t i = 0; i < t.element_count(); ++i) {
      float& value = model.parameters.floats(unit, tensor)[i];
      std::uint16_t& half = narrow.halves(unit, tensor)[i];
      half = half_from_float(dtype, value);
      value = float_from_half(dtype, half);
    }
  });
  const PassResult wide = model.run(2);
  for (const DType gradients : {DType::kFp32, DType::kBf16, DType::kFp16}) {
    GptCompute compute(model.config, model.shape, {.threads = 2, .precision = {dtype, gradients}});
    const PassResult result =
        run_training_pass(compute, model.spec, narrow, gradients, model.tokens, model.targets);
    EXPECT_EQ(result.loss, wide.loss);
    for (const auto& [name, expected] : wide.gradients) {
      if (name == "wte.weight" && is_tied && gradients != DType::kFp32) continue;  // two parts
      for (std::size_t i = 0; i < expected.size(); ++i) {
        const float rounded =
            gradients == DType::kFp32
                ? expected[i]
                : float_from_half(gradients, half_from_float(gradients, expected[i]));
        ASSERT_EQ(result.gradients.at(name)[i], rounded) << name << " " << i;
      }
    }
  }
}

TEST_P(WholeModel, Bf16AtRestEqualsFp32OfItsValuesRounded) {
  expect_fp32_of_values_rounded(GetParam(), DType::kBf16);
}

TEST_P(WholeModel, Fp16AtRestEqualsFp32OfItsValuesRounded) {
  expect_fp32_of_values_rounded(GetParam(), DType::kFp16);
}

// Boundaries in memory of the test's own, several micro-batches under way, in either order: the
// same bits as with all activations kept. Values that recomputation must not use are NaN.
class Checkpointed {
 public:
  Checkpointed(const Model& model, std::uint32_t micro_batches)
      : model_(model),
        compute_(
            model.config, model.shape,
            {.threads = 2, .checkpoints = Checkpoints::kUnits, .micro_batches = micro_batches}),
        boundaries_(compute_.use_count() - 1),
        values_(micro_batches * boundaries_),
        gradients_(micro_batches * boundaries_) {
    const auto bytes = boundary_bytes(model.config, model.shape);
    EXPECT_EQ(bytes.size(), boundaries_);
    for (std::size_t i = 0; i < values_.size(); ++i) {
      values_[i] = AlignedBuffer(bytes[i % boundaries_], "a test");
      gradients_[i] = AlignedBuffer(bytes[i % boundaries_], "a test");
      std::memset(values_[i].data(), 0xff, values_[i].size_bytes());
      std::memset(gradients_[i].data(), 0xff, gradients_[i].size_bytes());
    }
  }

  void start(std::uint32_t m, const std::vector<std::uint32_t>& tokens,
             const std::vector<std::uint32_t>& targets) {
    compute_.start_training(tokens, targets, m);
  }
  void forward(std::uint32_t use, std::uint32_t m) {
    compute_.forward(use, model_.parameters.const_pointers(unit_of(use)), of(use, m));
  }
  std::vector<float> backward(std::uint32_t use, std::uint32_t m) {
    const std::uint32_t unit = unit_of(compute_.use_count() - 1 - use);
    const TensorMemory memory(model_.spec, DType::kFp32);
    compute_.backward(use, model_.parameters.const_pointers(unit), memory.pointers(unit),
                      of(compute_.use_count() - 1 - use, m));
    std::vector<float> all;
    for (std::size_t i = 0; i < model_.spec.units[unit].tensors.size(); ++i) {
      const std::size_t count = model_.spec.units[unit].tensors[i].element_count();
      all.insert(all.end(), memory.floats(unit, i), memory.floats(unit, i) + count);
    }
    return all;
  }
  std::uint32_t use_count() const { return compute_.use_count(); }
  double loss() const { return compute_.loss(); }
  std::uint64_t activation_bytes() const { return compute_.activation_bytes(); }

 private:
  std::uint32_t unit_of(std::uint32_t forward_use) const {
    return index_of(model_.spec.forward_order[forward_use]);
  }
  Boundaries of(std::uint32_t forward_use, std::uint32_t m) {
    Boundaries result{.micro_batch = m};
    const auto floats = [&](std::vector<AlignedBuffer>& buffers, std::uint32_t boundary) {
      return reinterpret_cast<float*>(buffers[m * boundaries_ + boundary].data());
    };
    if (forward_use > 0) {
      result.input = floats(values_, forward_use - 1);
      result.input_gradient = floats(gradients_, forward_use - 1);
    }
    if (forward_use < boundaries_) {
      result.output = floats(values_, forward_use);
      result.output_gradient = floats(gradients_, forward_use);
    }
    return result;
  }

  const Model& model_;
  GptCompute compute_;
  std::size_t boundaries_;
  std::vector<AlignedBuffer> values_, gradients_;  // by micro-batch, then boundary
};

TEST_P(WholeModel, RecomputationChangesNoBit) {
  const Model model(small_config(GetParam()), kSmallShape);
  std::vector<std::vector<std::uint32_t>> tokens{model.tokens, model.targets};
  // With all activations kept, one after the other.
  std::vector<double> losses;
  std::vector<std::vector<std::vector<float>>> expected(2);  // by micro-batch and use
  for (std::uint32_t m = 0; m < 2; ++m) {
    GptCompute kept(model.config, model.shape, {.threads = 2});
    kept.start_training(tokens[m], tokens[1 - m]);
    run_forward(kept, model.spec, model.parameters);
    losses.push_back(kept.loss());
    for (std::uint32_t use = 0; use < kept.use_count(); ++use) {
      const std::uint32_t unit = index_of(model.spec.backward_order[use]);
      const TensorMemory memory(model.spec, DType::kFp32);
      kept.backward(use, model.parameters.const_pointers(unit), memory.pointers(unit));
      std::vector<float>& all = expected[m].emplace_back();
      for (std::size_t i = 0; i < model.spec.units[unit].tensors.size(); ++i) {
        const std::size_t count = model.spec.units[unit].tensors[i].element_count();
        all.insert(all.end(), memory.floats(unit, i), memory.floats(unit, i) + count);
      }
    }
  }
  for (const std::uint32_t at_once : {1u, 2u}) {
    Checkpointed checkpointed(model, 2);
    for (std::uint32_t first = 0; first < 2; first += at_once) {
      const auto each = [&](const auto& body) {
        for (std::uint32_t use = 0; use < checkpointed.use_count(); ++use) {
          for (std::uint32_t m = first; m < first + at_once; ++m) body(use, m);
        }
      };
      each([&](std::uint32_t use, std::uint32_t m) {
        if (use == 0) checkpointed.start(m, tokens[m], tokens[1 - m]);
        checkpointed.forward(use, m);
        if (use + 1 == checkpointed.use_count()) {
          EXPECT_EQ(checkpointed.loss(), losses[m]);
        }
      });
      each([&](std::uint32_t use, std::uint32_t m) {
        EXPECT_TRUE(checkpointed.backward(use, m) == expected[m][use])
            << "use " << use << " of micro-batch " << m << ", " << at_once << " at once";
      });
    }
  }
}

TEST(GptCompute, CheckpointsKeepTheMemoryOfOneBlock) {
  const GptConfig config{.layers = 12};
  const BatchShape shape{.batch = 2, .sequence = 64};
  const GptCompute one({.layers = 1}, shape, {.threads = 1, .checkpoints = Checkpoints::kUnits});
  const GptCompute all(config, shape, {.threads = 1, .checkpoints = Checkpoints::kUnits});
  EXPECT_EQ(one.activation_bytes(), all.activation_bytes());
}

TEST(GptCompute, MemoryIsCountedAndNotGrown) {
  const GptConfig config;
  GptCompute compute(config, {.batch = 2, .sequence = 64}, {.threads = 1});
  const std::uint64_t narrow_bytes = 2 * 64 * config.embedding * sizeof(float);
  EXPECT_GT(compute.activation_bytes(), narrow_bytes * (16 * config.layers + 8));
  EXPECT_LT(compute.activation_bytes(), narrow_bytes * (18 * config.layers + 12));
}

// Before anything is made: budgets are dealt out by it.
TEST(GptCompute, MemoryIsKnownBefore) {
  const BatchShape shape{.batch = 3, .sequence = 33};
  for (const bool tied : {true, false}) {
    const GptConfig config{.layers = 3, .tied_head = tied};
    for (const DType type : {DType::kFp32, DType::kBf16}) {
      for (const Checkpoints checkpoints : {Checkpoints::kNone, Checkpoints::kUnits}) {
        const GptComputeOptions options{.threads = 2,
                                        .precision = {.parameters = type, .gradients = type},
                                        .checkpoints = checkpoints};
        EXPECT_EQ(GptCompute::activation_bytes_of(config, shape, options),
                  GptCompute(config, shape, options).activation_bytes());
      }
    }
  }
}

TEST(GptCompute, RejectsWhatItCannotCompute) {
  const GptConfig config;
  const auto code_of = [](const auto& call) {
    try {
      call();
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::kInternal;
  };
  EXPECT_EQ(code_of([&] { GptCompute(config, {1, 129}, {}); }), ErrorCode::kConfig);
  EXPECT_EQ(code_of([&] { GptCompute(config, {0, 1}, {}); }), ErrorCode::kConfig);
  EXPECT_EQ(code_of([&] { GptCompute(config, {1, 1}, {.threads = 0}); }), ErrorCode::kConfig);
  GptCompute compute(config, {1, 2}, {});
  const std::vector<std::uint32_t> tokens = {1, 256};
  EXPECT_EQ(code_of([&] { compute.start_training(tokens, tokens); }), ErrorCode::kInput);
}

TEST(GptComputeDeathTest, UsesComeInOrder) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const Model model(small_config(true), kSmallShape);
  GptCompute compute(model.config, model.shape, {});
  EXPECT_DEATH(compute.forward(0, model.parameters.const_pointers(0)), "in order, after a start");
  compute.start_evaluation(model.tokens, model.targets);
  EXPECT_DEATH(compute.forward(1, model.parameters.const_pointers(1)), "in order, after a start");
  EXPECT_DEATH(compute.loss(), "after the last forward use");
  run_forward(compute, model.spec, model.parameters);
  EXPECT_DEATH(
      compute.backward(0, model.parameters.const_pointers(0), model.parameters.pointers(0)),
      "forward pass of training");
}

}  // namespace
}  // namespace sluice::gpt
