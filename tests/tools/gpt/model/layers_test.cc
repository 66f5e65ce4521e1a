// Every layer besides attention and products: values against formulas in double, gradients against
// central differences of the same formulas.
#include "tools/gpt/model/layers.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/tools/gpt/model/reference_gpt.h"
#include "tools/gpt/model/counter_random.h"

namespace sluice::gpt {
namespace {

using reference::central_difference;
using reference::Vector;

std::vector<float> random_floats(const char* stream, std::uint64_t count, double scale = 1.0) {
  const CounterRandom random(1, stream);
  std::vector<float> values(count);
  for (std::uint64_t i = 0; i < count; ++i)
    values[i] = static_cast<float>(scale * random.normal(i));
  return values;
}

Vector widened(const std::vector<float>& values) {
  return Vector(values.begin(), values.end());
}

double dot(const Vector& a, const std::vector<float>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

class Layers : public testing::TestWithParam<unsigned> {
 protected:
  ComputeThreads threads_{GetParam()};
};
INSTANTIATE_TEST_SUITE_P(Threads, Layers, testing::Values(1u, 2u, 3u));

TEST_P(Layers, GeluAndItsDerivative) {
  std::vector<float> x;
  for (int i = -1200; i <= 1200; ++i) x.push_back(static_cast<float>(i) * 0.01f);
  std::vector<float> y(x.size());
  gelu_forward(threads_, x.data(), y.data(), x.size());
  std::vector<float> gradient(x.size(), 2.0f);
  gelu_backward(threads_, x.data(), gradient.data(), x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    double at = x[i];
    const double derivative = central_difference(&at, [&] { return reference::gelu(at); });
    ASSERT_NEAR(y[i], reference::gelu(at), 3e-6 * std::abs(reference::gelu(at)) + 1e-15) << x[i];
    ASSERT_NEAR(gradient[i], 2 * derivative, 2e-6) << x[i];
  }
}

TEST_P(Layers, GeluPassesExtremesOn) {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> x = {0.0f, 1e4f, -1e4f, infinity, std::nanf("")};
  std::vector<float> y(x.size());
  gelu_forward(threads_, x.data(), y.data(), x.size());
  EXPECT_EQ(y[0], 0.0f);
  EXPECT_EQ(y[1], 1e4f);
  EXPECT_NEAR(y[2], 0.0f, 1e-30f);
  EXPECT_EQ(y[3], infinity);
  EXPECT_TRUE(std::isnan(y[4]));
}

TEST_P(Layers, LayerNorm) {
  // 40 is no multiple of the 16 lanes and more than one slice of columns; 70 rows span two blocks.
  const Extent extent{70, 40};
  const std::uint64_t count = extent.rows * extent.columns;
  const std::vector<float> x = random_floats("x", count, 2.0);
  const std::vector<float> weight = random_floats("weight", extent.columns);
  const std::vector<float> bias = random_floats("bias", extent.columns);
  const std::vector<float> dy = random_floats("dy", count);
  std::vector<float> y(count), dx(count, 1e30f), d_weight(extent.columns), d_bias(extent.columns);
  std::vector<RowMoments> moments(extent.rows);
  layer_norm_forward(threads_, extent, x.data(), {weight.data(), bias.data()}, y.data(),
                     moments.data());
  layer_norm_backward(threads_, extent, {x.data(), moments.data(), weight.data()}, dy.data(),
                      {dx.data(), Into::kOverwrite, d_weight.data(), d_bias.data()});

  Vector x64 = widened(x), weight64 = widened(weight), bias64 = widened(bias);
  const Vector expected = reference::layer_norm(x64, weight64, bias64);
  for (std::size_t i = 0; i < count; ++i) ASSERT_NEAR(y[i], expected[i], 2e-6) << i;
  const auto objective = [&] { return dot(reference::layer_norm(x64, weight64, bias64), dy); };
  for (std::size_t i = 0; i < count; i += 37)
    ASSERT_NEAR(dx[i], central_difference(&x64[i], objective), 5e-6) << i;
  for (std::size_t i = 0; i < extent.columns; ++i) {
    ASSERT_NEAR(d_weight[i], central_difference(&weight64[i], objective), 2e-5) << i;
    ASSERT_NEAR(d_bias[i], central_difference(&bias64[i], objective), 2e-5) << i;
  }

  std::vector<float> accumulated(count, 3.0f);
  layer_norm_backward(threads_, extent, {x.data(), moments.data(), weight.data()}, dy.data(),
                      {accumulated.data(), Into::kAccumulate, d_weight.data(), d_bias.data()});
  for (std::size_t i = 0; i < count; ++i) ASSERT_NEAR(accumulated[i], 3.0f + dx[i], 1e-6);
}

TEST_P(Layers, CrossEntropy) {
  const Extent extent{19, 37};
  const std::vector<float> logits = random_floats("logits", extent.rows * extent.columns, 4.0);
  std::vector<std::uint32_t> targets(extent.rows);
  for (std::uint32_t i = 0; i < extent.rows; ++i) targets[i] = i * 5 % 37;
  std::vector<float> losses(extent.rows);
  std::vector<float> gradient = logits;
  const double loss = cross_entropy(threads_, extent, gradient.data(), targets, losses.data(),
                                    CrossEntropy::kGradient);
  std::vector<float> untouched = logits;
  const double loss_only = cross_entropy(threads_, extent, untouched.data(), targets, losses.data(),
                                         CrossEntropy::kLossOnly);
  Vector x = widened(logits);
  const auto objective = [&] { return reference::cross_entropy(x, targets); };
  EXPECT_NEAR(loss, objective(), 1e-6);
  EXPECT_NEAR(loss_only, objective(), 1e-6);
  EXPECT_EQ(untouched, logits);
  for (std::size_t i = 0; i < x.size(); ++i)
    ASSERT_NEAR(gradient[i], central_difference(&x[i], objective), 1e-8) << i;
}

// A loss that overflows exp() without subtraction of the maximum, and a certain target.
TEST_P(Layers, CrossEntropyOfLargeLogits) {
  std::vector<float> logits = {500.0f, 100.0f, -500.0f};
  const std::vector<std::uint32_t> certain = {0};
  float row = 0;
  const double loss =
      cross_entropy(threads_, {1, 3}, logits.data(), certain, &row, CrossEntropy::kGradient);
  EXPECT_NEAR(loss, 0.0, 1e-6);
  for (const float g : logits) EXPECT_NEAR(g, 0.0f, 1e-30f);
}

TEST_P(Layers, Embedding) {
  constexpr std::uint64_t kVocabulary = 11, kContext = 6, kSequence = 4, kWidth = 300;
  const std::vector<float> token = random_floats("token", kVocabulary * kWidth);
  const std::vector<float> position = random_floats("position", kContext * kWidth);
  const std::vector<std::uint32_t> tokens = {3, 3, 10, 0, 3, 1, 2, 3};
  std::vector<float> y(tokens.size() * kWidth);
  embedding_forward(threads_, {DType::kFp32, token.data(), position.data()}, tokens, kSequence,
                    kWidth, y.data());
  const std::vector<float> dy = random_floats("dy", y.size());
  std::vector<float> d_token(token.size(), 1e30f), d_position(position.size(), 1e30f);
  embedding_backward(threads_, tokens, kSequence, kWidth, dy.data(),
                     {d_token.data(), d_position.data(), kVocabulary, kContext});
  Vector expected_token(token.size()), expected_position(position.size());
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    for (std::size_t i = 0; i < kWidth; ++i) {
      ASSERT_EQ(y[t * kWidth + i],
                token[tokens[t] * kWidth + i] + position[t % kSequence * kWidth + i]);
      expected_token[tokens[t] * kWidth + i] += dy[t * kWidth + i];
      expected_position[t % kSequence * kWidth + i] += dy[t * kWidth + i];
    }
  }
  for (std::size_t i = 0; i < token.size(); ++i) ASSERT_NEAR(d_token[i], expected_token[i], 1e-5);
  for (std::size_t i = 0; i < position.size(); ++i)
    ASSERT_NEAR(d_position[i], expected_position[i], 1e-5);
}

TEST_P(Layers, EmbeddingOfBf16EqualsThatOfItsValues) {
  constexpr std::uint64_t kWidth = 20;
  std::vector<std::uint16_t> table(5 * kWidth);
  for (std::size_t i = 0; i < table.size(); ++i)
    table[i] = bf16_from_float(static_cast<float>(i) * 0.37f);
  std::vector<float> wide(table.size());
  widen(threads_, DType::kBf16, table.data(), wide.data(), table.size());
  const std::vector<std::uint32_t> tokens = {4, 0, 2};
  std::vector<float> narrow_y(3 * kWidth), wide_y(3 * kWidth);
  embedding_forward(threads_, {DType::kBf16, table.data(), table.data()}, tokens, 3, kWidth,
                    narrow_y.data());
  embedding_forward(threads_, {DType::kFp32, wide.data(), wide.data()}, tokens, 3, kWidth,
                    wide_y.data());
  EXPECT_EQ(narrow_y, wide_y);
}

TEST_P(Layers, BiasBackwardSumsColumns) {
  const Extent extent{130, 75};
  const std::vector<float> dy = random_floats("dy", extent.rows * extent.columns);
  std::vector<float> sums(extent.columns, 1e30f);
  bias_backward(threads_, extent, dy.data(), sums.data());
  for (std::size_t j = 0; j < extent.columns; ++j) {
    double expected = 0;
    for (std::size_t i = 0; i < extent.rows; ++i) expected += dy[i * extent.columns + j];
    ASSERT_NEAR(sums[j], expected, 1e-5);
  }
}

// The vector versions of the conversions against the scalar definitions, with every kind of value.
TEST_P(Layers, RoundingIsTheDefinition) {
  std::vector<float> values;
  for (std::uint64_t bits = 0; bits <= 0xffffffffu; bits += 9973)
    values.push_back(float_from_bits(static_cast<std::uint32_t>(bits)));
  for (const std::uint32_t bits :
       {0x7f800000u, 0xff800000u, 0x7f800001u, 0x7fffffffu, 0x3f808000u, 0x3f818000u, 0x7f7fffffu,
        0x80000000u, 0x387fffffu, 0x38800000u, 0x33000000u, 0x33000001u, 0x477fefffu, 0x477ff000u,
        0x477fffffu, 0x47800000u, 0x3f801000u, 0x3f803000u})
    values.push_back(float_from_bits(bits));
  std::vector<std::uint16_t> rounded(values.size());
  round_to(threads_, DType::kBf16, values.data(), rounded.data(), values.size());
  for (std::size_t i = 0; i < values.size(); ++i)
    ASSERT_EQ(rounded[i], bf16_from_float(values[i])) << std::hex << bits_from_float(values[i]);
  round_to(threads_, DType::kFp16, values.data(), rounded.data(), values.size());
  for (std::size_t i = 0; i < values.size(); ++i)
    ASSERT_EQ(rounded[i], fp16_from_float(values[i])) << std::hex << bits_from_float(values[i]);
}

TEST_P(Layers, WideningIsTheDefinition) {
  std::vector<std::uint16_t> halves(0x10000);
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
  std::vector<float> wide(halves.size());
  widen(threads_, DType::kFp16, halves.data(), wide.data(), halves.size());
  for (std::size_t i = 0; i < halves.size(); ++i)
    ASSERT_EQ(bits_from_float(wide[i]), bits_from_float(float_from_fp16(halves[i]))) << i;
}

}  // namespace
}  // namespace sluice::gpt
