// Products by OpenBLAS and oneDNN against plain loops in double, and the promises about bits:
// threads and addresses that are multiples of 256 bytes change none.
#include "tools/gpt/model/matmul.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
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
      MatrixProducts(threads).multiply(form, o.a_view, o.b_view, {result.data(), s.m, s.n, s.n});
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
  MatrixProducts(threads).multiply(Form::kAB, o.a_view, o.b_view, {both.data(), s.m, s.n, s.n},
                                   {.bias = bias.data(), .matrix = addend.data()});
  std::vector<float> bias_only(s.m * s.n);
  MatrixProducts(threads).multiply(Form::kAB, o.a_view, o.b_view, {bias_only.data(), s.m, s.n, s.n},
                                   {.bias = bias.data()});
  std::vector<float> in_place = addend;
  MatrixProducts(threads).multiply(Form::kAB, o.a_view, o.b_view, {in_place.data(), s.m, s.n, s.n},
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
      MatrixProducts(single).multiply(form, o.a_view, o.b_view, {one.data(), s.m, s.n, s.n});
      for (const unsigned count : {2u, 3u}) {
        ComputeThreads threads(count);
        std::vector<float> many(s.m * s.n);
        MatrixProducts(threads).multiply(form, o.a_view, o.b_view, {many.data(), s.m, s.n, s.n});
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
      MatrixProducts(threads).multiply(form, o.a_view, o.b_view, {result, s.m, s.n, s.n});
      const std::vector<float> now(result, result + s.m * s.n);
      if (shift == 0) expected = now;
      ASSERT_EQ(std::memcmp(expected.data(), now.data(), now.size() * sizeof(float)), 0) << shift;
    }
  }
}

// The same against oneDNN, with what it needs: bf16 factors where the processor has kernels for
// them.
class OneDnnMatmul : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string& why = OneDnn::library().why_not(); !why.empty())
      GTEST_SKIP() << "no oneDNN: " << why;
  }
  static bool has_bf16() { return OneDnn::library().family() >= KernelFamily::kAvx512Bf16; }
  static MatmulChoice choice(bool bf16) {
    return {.library = MatrixLibrary::kOneDnn, .bf16_factors = bf16};
  }
};

// Factors rounded to bf16, in rows that are further apart than they are long.
struct Bf16Operands {
  std::vector<std::uint16_t> a, b;
  ConstMatrix a_view, b_view;

  Bf16Operands(Form form, Sizes s) {
    const Operands o(form, s);
    a_view = spread(o.a, o.a_view, a);
    b_view = spread(o.b, o.b_view, b);
  }
  static ConstMatrix spread(const std::vector<float>& values, ConstMatrix view,
                            std::vector<std::uint16_t>& memory) {
    const std::uint64_t stride = view.columns + 3;
    memory.assign(view.rows * stride, 0x7fc0);  // NaN: a read between the rows has one
    for (std::uint64_t i = 0; i < view.rows; ++i)
      for (std::uint64_t j = 0; j < view.columns; ++j)
        memory[i * stride + j] = bf16_from_float(values[i * view.stride + j]);
    return {memory.data(), view.rows, view.columns, stride, DType::kBf16};
  }

  struct Sum {
    double value = 0, magnitude = 0;
  };
  Sum element(Form form, std::uint64_t i, std::uint64_t j, std::uint64_t k) const {
    Sum sum;
    for (std::uint64_t t = 0; t < k; ++t) {
      const double product =
          static_cast<double>(float_from_bf16(form == Form::kAtB ? a[t * a_view.stride + i]
                                                                 : a[i * a_view.stride + t])) *
          float_from_bf16(form == Form::kABt ? b[j * b_view.stride + t] : b[t * b_view.stride + j]);
      sum.value += product;
      sum.magnitude += std::abs(product);
    }
    return sum;
  }
};

// fp32 sums of k exact products: at most k roundings of partial sums, none larger than the sum of
// magnitudes.
double bound_of(const Bf16Operands::Sum& sum, std::uint64_t k) {
  return static_cast<double>(k) * 0x1p-23 * sum.magnitude + 1e-30;
}

constexpr Sizes kBf16Sizes[] = {{1, 1, 1},     {3, 5, 7},      {1, 40, 33},    {64, 64, 32},
                                {130, 70, 19}, {257, 530, 21}, {96, 512, 300}, {64, 32, 1025}};

TEST_F(OneDnnMatmul, Bf16ProductsStayWithinTheBoundOfFp32Sums) {
  if (!has_bf16()) GTEST_SKIP() << "no bf16 kernels: " << name_of(OneDnn::library().family());
  ComputeThreads threads(2);
  for (const Form form : kForms) {
    for (const Sizes s : kBf16Sizes) {
      const Bf16Operands o(form, s);
      std::vector<float> result(s.m * s.n, 1e30f);
      std::vector<std::uint16_t> rounded(s.m * s.n, 0x7fc0);
      MatrixProducts products(threads, choice(true));
      products.multiply(form, o.a_view, o.b_view, {result.data(), s.m, s.n, s.n});
      products.multiply(form, o.a_view, o.b_view, {rounded.data(), s.m, s.n, s.n, DType::kBf16});
      for (std::uint64_t i = 0; i < s.m; ++i) {
        for (std::uint64_t j = 0; j < s.n; ++j) {
          const Bf16Operands::Sum sum = o.element(form, i, j, s.k);
          const float value = result[i * s.n + j];
          ASSERT_NEAR(value, sum.value, bound_of(sum, s.k))
              << s.m << "x" << s.n << "x" << s.k << " form " << static_cast<int>(form);
          ASSERT_EQ(rounded[i * s.n + j], bf16_from_float(value));
        }
      }
      EXPECT_EQ(products.work().onednn, 2 * s.m * s.n * s.k);
      EXPECT_EQ(products.work().openblas, 0u);
    }
  }
}

TEST_F(OneDnnMatmul, Bf16ProductsAddBiasAndMatrix) {
  if (!has_bf16()) GTEST_SKIP() << "no bf16 kernels: " << name_of(OneDnn::library().family());
  ComputeThreads threads(2);
  const Sizes s{140, 600, 8};
  const Bf16Operands o(Form::kAB, s);
  const std::vector<float> bias = random_floats("bias", s.n);
  std::vector<float> sum = random_floats("addend", s.m * s.n);
  const std::vector<float> addend = sum;
  MatrixProducts(threads, choice(true))
      .multiply(Form::kAB, o.a_view, o.b_view, {sum.data(), s.m, s.n, s.n},
                {.bias = bias.data(), .matrix = sum.data()});
  for (std::uint64_t i = 0; i < s.m; ++i)
    for (std::uint64_t j = 0; j < s.n; ++j)
      ASSERT_NEAR(sum[i * s.n + j],
                  o.element(Form::kAB, i, j, s.k).value + bias[j] + addend[i * s.n + j], 1e-5);
}

TEST_F(OneDnnMatmul, Fp32ProductsEqualPlainLoops) {
  ComputeThreads threads(2);
  for (const Form form : kForms) {
    for (const Sizes s : kSizes) {
      const Operands o(form, s);
      std::vector<float> result(s.m * s.n, 1e30f);
      MatrixProducts(threads, choice(false))
          .multiply(form, o.a_view, o.b_view, {result.data(), s.m, s.n, s.n});
      for (std::uint64_t i = 0; i < s.m; ++i)
        for (std::uint64_t j = 0; j < s.n; ++j)
          ASSERT_NEAR(result[i * s.n + j], element(o, form, i, j, s.k), 1e-4);
    }
  }
}

TEST_F(OneDnnMatmul, ThreadsAndAddressesChangeNoBit) {
  for (const Form form : kForms) {
    for (const Sizes s : {Sizes{300, 576, 192}, Sizes{192, 768, 1024}, Sizes{77, 33, 500}}) {
      for (const bool bf16 : {false, true}) {
        if (bf16 && !has_bf16()) continue;
        const Operands wide(form, s);
        const Bf16Operands narrow(form, s);
        std::vector<float> first;
        for (std::uint64_t run = 0; run < 4; ++run) {
          ComputeThreads threads(static_cast<unsigned>(1 + run % 3));
          AlignedBuffer memory(4096 + s.m * s.n * sizeof(float), "result");
          auto* const result = reinterpret_cast<float*>(memory.data() + run * 256);
          MatrixProducts(threads, choice(bf16))
              .multiply(form, bf16 ? narrow.a_view : wide.a_view,
                        bf16 ? narrow.b_view : wide.b_view, {result, s.m, s.n, s.n});
          const std::vector<float> now(result, result + s.m * s.n);
          std::vector<std::uint16_t> rounded(bf16 ? now.size() : 0);
          if (bf16)
            MatrixProducts(threads, choice(bf16))
                .multiply(form, narrow.a_view, narrow.b_view,
                          {rounded.data(), s.m, s.n, s.n, DType::kBf16});
          for (std::size_t i = 0; i < rounded.size(); ++i)
            ASSERT_EQ(rounded[i], bf16_from_float(now[i])) << run << " at " << i;
          if (run == 0) first = now;
          ASSERT_EQ(std::memcmp(first.data(), now.data(), now.size() * sizeof(float)), 0) << run;
        }
      }
    }
  }
}

// Long enough that several threads are at it at once.
TEST_F(OneDnnMatmul, EachThreadSumsInATileOfItsOwn) {
  if (!has_bf16()) GTEST_SKIP() << "no bf16 kernels: " << name_of(OneDnn::library().family());
  const Sizes s{1024, 2048, 64};
  const Bf16Operands o(Form::kAB, s);
  std::vector<std::uint16_t> first(s.m * s.n);
  ComputeThreads single(1);
  MatrixProducts(single, choice(true))
      .multiply(Form::kAB, o.a_view, o.b_view, {first.data(), s.m, s.n, s.n, DType::kBf16});
  ComputeThreads threads(3);
  MatrixProducts products(threads, choice(true));
  for (int run = 0; run < 20; ++run) {
    std::vector<std::uint16_t> now(s.m * s.n);
    products.multiply(Form::kAB, o.a_view, o.b_view, {now.data(), s.m, s.n, s.n, DType::kBf16});
    ASSERT_EQ(std::memcmp(first.data(), now.data(), now.size() * sizeof now[0]), 0) << run;
  }
}

TEST(MatmulDeathTest, Bf16FactorsHaveToBeChosen) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  ComputeThreads threads(1);
  const Bf16Operands o(Form::kAB, {4, 4, 4});
  std::vector<float> result(16);
  EXPECT_DEATH(
      MatrixProducts(threads).multiply(Form::kAB, o.a_view, o.b_view, {result.data(), 4, 4, 4}),
      "bf16 only where that was chosen");
}

TEST(MatmulDeathTest, ExtentsMustMatch) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  ComputeThreads threads(1);
  std::vector<float> values(64);
  EXPECT_DEATH(MatrixProducts(threads).multiply(Form::kAB, {values.data(), 4, 4, 4},
                                                {values.data(), 5, 4, 4}, {values.data(), 4, 4, 4}),
               "extents of a matrix product");
}

}  // namespace
}  // namespace sluice::gpt
