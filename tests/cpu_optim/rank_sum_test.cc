// Sums over ranks: every instruction set against the scalar definition, and the definition against
// sums worked out by hand.
#include "cpu_optim/rank_sum.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "cpu_optim/simd_kernels.h"

namespace sluice {
namespace {

struct Types {
  DType source;
  DType target;
};
constexpr Types kTypes[] = {{DType::kFp32, DType::kFp32}, {DType::kBf16, DType::kBf16},
                            {DType::kFp16, DType::kFp16}, {DType::kBf16, DType::kFp32},
                            {DType::kFp16, DType::kFp32}, {DType::kFp32, DType::kBf16},
                            {DType::kFp32, DType::kFp16}};

float get(DType type, const std::vector<std::byte>& data, std::uint64_t i) {
  const auto* halves = reinterpret_cast<const std::uint16_t*>(data.data());
  if (type == DType::kFp32) return reinterpret_cast<const float*>(data.data())[i];
  return type == DType::kBf16 ? float_from_bf16(halves[i]) : float_from_fp16(halves[i]);
}

bool same(float a, float b) {
  return (a != a && b != b) || bits_from_float(a) == bits_from_float(b);
}

// Any bits: NaNs of every payload, infinities, denormals.
std::vector<std::byte> random_bytes(std::uint64_t size_bytes, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(size_bytes);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() >> 8);
  return bytes;
}

TEST(OrderedSum, EveryTargetEqualsReference) {
  for (const SimdKernels& kernels : available_simd_kernels()) {
    for (const Types types : kTypes) {
      for (std::uint32_t ranks = 1; ranks <= 5; ++ranks) {
        for (const std::uint64_t count : {0u, 1u, 7u, 31u, 32u, 33u, 64u, 1000u, 4096u}) {
          std::vector<std::vector<std::byte>> data;
          std::vector<const void*> sources;
          for (std::uint32_t rank = 0; rank < ranks; ++rank)
            data.push_back(random_bytes(count * size_of(types.source), rank * 7919 + 1));
          for (const auto& source : data) sources.push_back(source.data());
          std::vector<std::byte> expected(count * size_of(types.target));
          std::vector<std::byte> actual = expected;
          OrderedSum sum{.target = expected.data(),
                         .target_type = types.target,
                         .sources = sources,
                         .source_type = types.source,
                         .element_count = count};
          sum_in_order_reference(sum);
          sum.target = actual.data();
          kernels.sum_in_order(sum);
          for (std::uint64_t i = 0; i < count; ++i) {
            ASSERT_TRUE(same(get(types.target, actual, i), get(types.target, expected, i)))
                << kernels.target_name << " " << name_of(types.source) << " to "
                << name_of(types.target) << ", " << ranks << " ranks, element " << i;
          }
        }
      }
    }
  }
}

// 1 + 2^-24 + 2^-24 depends on the order: from the left each half unit is lost to the even
// neighbour, from the right they make a whole one first.
TEST(OrderedSum, AddsFromTheFirstSourceOn) {
  const std::vector<float> one(100, 1.0f);
  const std::vector<float> half_unit(100, 0x1p-24f);
  std::vector<float> total(100);
  const void* large_first[] = {one.data(), half_unit.data(), half_unit.data()};
  sum_in_order({.target = total.data(), .sources = large_first, .element_count = 100});
  for (const float value : total) EXPECT_EQ(value, 1.0f);
  const void* large_last[] = {half_unit.data(), half_unit.data(), one.data()};
  sum_in_order({.target = total.data(), .sources = large_last, .element_count = 100});
  for (const float value : total) EXPECT_EQ(value, 1.0f + 0x1p-23f);
}

// In bf16 arithmetic 256 + 1 + 1 stays 256 at every step; one rounding at the end gives 258.
TEST(OrderedSum, RoundsOnce) {
  const std::vector<std::uint16_t> large(70, bf16_from_float(256.0f));
  const std::vector<std::uint16_t> one(70, bf16_from_float(1.0f));
  std::vector<std::uint16_t> total(70);
  const void* sources[] = {large.data(), one.data(), one.data()};
  sum_in_order({.target = total.data(),
                .target_type = DType::kBf16,
                .sources = sources,
                .source_type = DType::kBf16,
                .element_count = 70});
  for (const std::uint16_t value : total) EXPECT_EQ(float_from_bf16(value), 258.0f);
}

}  // namespace
}  // namespace sluice
