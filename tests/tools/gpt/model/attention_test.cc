// Attention against plain loops in double: values, every gradient of a small case, and gradients
// along random directions of cases that span several blocks of queries.
#include "tools/gpt/model/attention.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "tests/tools/gpt/model/reference_gpt.h"
#include "tools/gpt/model/counter_random.h"

namespace sluice::gpt {
namespace {

using reference::Vector;

struct Case {
  AttentionShape shape;
  std::vector<float> qkv, y, log_sums, dy, dqkv, scratch;

  explicit Case(AttentionShape s, unsigned thread_count = 2) : shape(s) {
    const std::uint64_t rows = s.batch * s.sequence;
    const std::uint64_t width = s.heads * s.head_width;
    qkv = random_floats("qkv", rows * 3 * width);
    dy = random_floats("dy", rows * width);
    y.assign(rows * width, 1e30f);
    log_sums.assign(rows * s.heads, 1e30f);
    dqkv.assign(rows * 3 * width, 1e30f);
    ComputeThreads threads(thread_count);
    scratch.assign(thread_count * attention_scratch_floats(s.sequence), 1e30f);
    MatrixProducts products(threads);
    attention_forward(products, s, qkv.data(), y.data(), log_sums.data(), scratch);
    attention_backward(products, s, {qkv.data(), y.data(), log_sums.data()}, dy.data(), dqkv.data(),
                       scratch);
  }

  static std::vector<float> random_floats(const char* stream, std::uint64_t count) {
    const CounterRandom random(1, stream);
    std::vector<float> values(count);
    for (std::uint64_t i = 0; i < count; ++i) values[i] = static_cast<float>(random.normal(i));
    return values;
  }

  Vector reference_output(const Vector& input) const {
    return reference::attention(input, {shape.sequence, shape.heads, shape.head_width});
  }
  // sum(dy * attention(input)): its gradient is dqkv.
  double reference_objective(const Vector& input) const {
    const Vector output = reference_output(input);
    double sum = 0;
    for (std::size_t i = 0; i < output.size(); ++i) sum += output[i] * dy[i];
    return sum;
  }
};

constexpr AttentionShape kShapes[] = {{1, 1, 1, 1},   {2, 5, 2, 3},   {1, 64, 1, 8},
                                      {2, 65, 2, 16}, {1, 150, 3, 4}, {1, 192, 1, 32}};

TEST(Attention, ForwardEqualsPlainLoops) {
  for (const AttentionShape& shape : kShapes) {
    const Case c(shape);
    const Vector expected = c.reference_output(Vector(c.qkv.begin(), c.qkv.end()));
    for (std::size_t i = 0; i < expected.size(); ++i)
      ASSERT_NEAR(c.y[i], expected[i], 1e-5) << shape.sequence << " at " << i;
  }
}

TEST(Attention, BackwardEqualsDifferencesElementByElement) {
  const Case c({2, 5, 2, 3});
  Vector x(c.qkv.begin(), c.qkv.end());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double expected =
        reference::central_difference(&x[i], [&] { return c.reference_objective(x); });
    ASSERT_NEAR(c.dqkv[i], expected, 2e-5) << i;
  }
}

TEST(Attention, BackwardEqualsDifferencesAlongDirections) {
  for (const AttentionShape& shape : kShapes) {
    const Case c(shape);
    for (const char* stream : {"first", "second", "third"}) {
      const std::vector<float> direction = Case::random_floats(stream, c.qkv.size());
      double analytic = 0;
      double scale = 0;
      for (std::size_t i = 0; i < direction.size(); ++i) {
        analytic += static_cast<double>(c.dqkv[i]) * direction[i];
        scale += std::abs(static_cast<double>(c.dqkv[i]) * direction[i]);
      }
      double step = 0;
      const double expected = reference::central_difference(&step, [&] {
        Vector x(c.qkv.begin(), c.qkv.end());
        for (std::size_t i = 0; i < x.size(); ++i) x[i] += step * direction[i];
        return c.reference_objective(x);
      });
      ASSERT_NEAR(analytic, expected, 1e-6 * scale + 1e-6) << shape.sequence << " " << stream;
    }
  }
}

TEST(Attention, ThreadsChangeNoBit) {
  const Case one({3, 100, 2, 16}, 1);
  for (const unsigned threads : {2u, 3u}) {
    const Case many({3, 100, 2, 16}, threads);
    EXPECT_EQ(std::memcmp(one.y.data(), many.y.data(), one.y.size() * 4), 0);
    EXPECT_EQ(std::memcmp(one.dqkv.data(), many.dqkv.data(), one.dqkv.size() * 4), 0);
  }
}

// A later token must not reach an earlier one.
TEST(Attention, IsCausal) {
  const Case c({1, 70, 1, 8});
  std::vector<float> changed = c.qkv;
  for (std::size_t i = changed.size() - 24; i < changed.size(); ++i) changed[i] += 5.0f;
  std::vector<float> y(c.y.size());
  std::vector<float> log_sums(c.log_sums.size());
  std::vector<float> scratch = c.scratch;
  ComputeThreads threads(1);
  MatrixProducts products(threads);
  attention_forward(products, c.shape, changed.data(), y.data(), log_sums.data(), scratch);
  EXPECT_EQ(std::memcmp(y.data(), c.y.data(), (y.size() - 8) * 4), 0);
  EXPECT_NE(std::memcmp(y.data(), c.y.data(), y.size() * 4), 0);
}

}  // namespace
}  // namespace sluice::gpt
