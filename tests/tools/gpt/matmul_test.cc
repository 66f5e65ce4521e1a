// Products against plain loops in double, and the promises about bits: threads and addresses that
// are multiples of 256 bytes change none.
#include "tools/gpt/model/matmul.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "base/aligned_buffer.h"
#include "tools/gpt/model/counter_random.h"

namespace sluice::gpt {
namespace {

std::vector<float> random_floats(const char* stream, std::uint64_t count) {
  const CounterRandom random(1, stream);
  std::vector<float> values(count);
  for (std::uint64_t i = 0; i < count; ++i) values[i] = static_cast<float>(random.normal(i));
  return values;
}

struct Sizes {
  std::uint64_t m, n, k;
};

// A and B as `form` stores them.
struct Operands {
  std::vector<float> a, b;
  ConstMatrix a_view, b_view;

  Operands(Form form, Sizes s)
      : a(random_floats("a", s.m * s.k)), b(random_floats("b", s.k * s.n)) {
    a_view = form == Form::kAtB ? ConstMatrix{a.data(), s.k, s.m, s.m}
                                : ConstMatrix{a.data(), s.m, s.k, s.k};
    b_view = form == Form::kABt ? ConstMatrix{b.data(), s.n, s.k, s.k}
                                : ConstMatrix{b.data(), s.k, s.n, s.n};
  }
};

double element(const Operands& o, Form form, std::uint64_t i, std::uint64_t j, std::uint64_t k) {
  double sum = 0;
  for (std::uint64_t t = 0; t < k; ++t) {
    const float a = form == Form::kAtB ? o.a[t * o.a_view.stride + i] : o.a[i * k + t];
    const float b = form == Form::kABt ? o.b[j * k + t] : o.b[t * o.b_view.stride + j];
    sum += static_cast<double>(a) * b;
  }
  return sum;
}

constexpr Form kForms[] = {Form::kAB, Form::kABt, Form::kAtB};
constexpr Sizes kSizes[] = {{1, 1, 1},    {3, 5, 7},     {1, 40, 33},
                            {64, 64, 32}, {130, 70, 19}, {257, 530, 21}};

TEST(Matmul, EqualsPlainLoops) {
  ComputeThreads threads(2);
  for (const Form form : kForms) {
    for (const Sizes s : kSizes) {
      const Operands o(form, s);
      std::vector<float> result(s.m * s.n, 1e30f);
      multiply(threads, form, o.a_view, o.b_view, {result.data(), s.m, s.n, s.n});
      for (std::uint64_t i = 0; i < s.m; ++i)
        for (std::uint64_t j = 0; j < s.n; ++j)
          ASSERT_NEAR(result[i * s.n + j], element(o, form, i, j, s.k), 1e-4)
              << s.m << "x" << s.n << "x" << s.k << " form " << static_cast<int>(form);
    }
  }
}

TEST(Matmul, AddsBiasAndMatrix) {
  ComputeThreads threads(2);
  const Sizes s{140, 600, 8};
  const Operands o(Form::kAB, s);
  const std::vector<float> bias = random_floats("bias", s.n);
  const std::vector<float> addend = random_floats("addend", s.m * s.n);
  std::vector<float> both(s.m * s.n);
  multiply(threads, Form::kAB, o.a_view, o.b_view, {both.data(), s.m, s.n, s.n},
           {.bias = bias.data(), .matrix = addend.data()});
  std::vector<float> bias_only(s.m * s.n);
  multiply(threads, Form::kAB, o.a_view, o.b_view, {bias_only.data(), s.m, s.n, s.n},
           {.bias = bias.data()});
  std::vector<float> in_place = addend;
  multiply(threads, Form::kAB, o.a_view, o.b_view, {in_place.data(), s.m, s.n, s.n},
           {.matrix = in_place.data()});
  for (std::uint64_t i = 0; i < s.m; ++i) {
    for (std::uint64_t j = 0; j < s.n; ++j) {
      const std::uint64_t at = i * s.n + j;
      const double product = element(o, Form::kAB, i, j, s.k);
      ASSERT_NEAR(both[at], product + bias[j] + addend[at], 1e-4);
      ASSERT_NEAR(bias_only[at], product + bias[j], 1e-4);
      ASSERT_NEAR(in_place[at], product + addend[at], 1e-4);
    }
  }
}

TEST(Matmul, ThreadsChangeNoBit) {
  for (const Form form : kForms) {
    for (const Sizes s : {Sizes{300, 576, 192}, Sizes{192, 768, 1024}, Sizes{77, 33, 500}}) {
      const Operands o(form, s);
      std::vector<float> one(s.m * s.n);
      ComputeThreads single(1);
      multiply(single, form, o.a_view, o.b_view, {one.data(), s.m, s.n, s.n});
      for (const unsigned count : {2u, 3u}) {
        ComputeThreads threads(count);
        std::vector<float> many(s.m * s.n);
        multiply(threads, form, o.a_view, o.b_view, {many.data(), s.m, s.n, s.n});
        ASSERT_EQ(std::memcmp(one.data(), many.data(), one.size() * sizeof(float)), 0) << count;
      }
    }
  }
}

// The base of every array moves through the offsets modulo 4096 that are multiples of 256.
TEST(Matmul, AddressesThatAreMultiplesOf256ChangeNoBit) {
  ComputeThreads threads(2);
  const Sizes s{130, 290, 96};
  const auto placed = [](const std::vector<float>& values, AlignedBuffer& memory,
                         std::uint64_t offset) {
    memory = AlignedBuffer(offset + values.size() * sizeof(float), "operand");
    std::memcpy(memory.data() + offset, values.data(), values.size() * sizeof(float));
    return reinterpret_cast<float*>(memory.data() + offset);
  };
  for (const Form form : kForms) {
    Operands o(form, s);
    std::vector<float> expected;
    for (std::uint64_t shift = 0; shift < 16; ++shift) {
      AlignedBuffer a, b, c;
      o.a_view.data = placed(o.a, a, shift * 256);
      o.b_view.data = placed(o.b, b, shift * 7 % 16 * 256);
      float* result = placed(std::vector<float>(s.m * s.n), c, shift * 5 % 16 * 256);
      multiply(threads, form, o.a_view, o.b_view, {result, s.m, s.n, s.n});
      const std::vector<float> now(result, result + s.m * s.n);
      if (shift == 0) expected = now;
      ASSERT_EQ(std::memcmp(expected.data(), now.data(), now.size() * sizeof(float)), 0) << shift;
    }
  }
}

TEST(MatmulDeathTest, ExtentsMustMatch) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  ComputeThreads threads(1);
  std::vector<float> values(64);
  EXPECT_DEATH(multiply(threads, Form::kAB, {values.data(), 4, 4, 4}, {values.data(), 5, 4, 4},
                        {values.data(), 4, 4, 4}),
               "extents of a matrix product");
}

}  // namespace
}  // namespace sluice::gpt
