#include "cpu_optim/gradient_ops.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "cpu_optim/float_environment.h"
#include "cpu_optim/simd_kernels.h"

namespace sluice {
namespace {

void check_dtype(DType dtype) {
  SLUICE_CHECK(dtype == DType::kFp32 || dtype == DType::kBf16, "gradients are fp32 or bf16");
}

float load(float value) {
  return value;
}
float load(std::uint16_t value) {
  return float_from_bf16(value);
}
void store(float value, float& target) {
  target = value;
}
void store(float value, std::uint16_t& target) {
  target = bf16_from_float(value);
}

template <class Element>
void accumulate(Element* target, const Element* source, std::uint64_t element_count) {
  for (std::uint64_t i = 0; i < element_count; ++i)
    store(load(target[i]) + load(source[i]), target[i]);
}

template <class Element>
double leaf_of(const Element* gradient, std::uint64_t element_count) {
  std::array<double, 8> lanes{};
  for (std::uint64_t i = 0; i < element_count; ++i) {
    const double value = static_cast<double>(load(gradient[i]));
    lanes[i % 8] += value * value;
  }
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
         ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

template <class Element>
void add_leaves(const Element* gradient, std::uint64_t element_count, NormAccumulator& total) {
  for (std::uint64_t begin = 0; begin < element_count; begin += kNormLeafElements)
    total.add(leaf_of(gradient + begin, std::min(kNormLeafElements, element_count - begin)));
}

bool is_non_finite(float value) {
  return (bits_from_float(value) & 0x7f800000u) == 0x7f800000u;
}

template <class Element>
std::optional<std::uint64_t> first_non_finite(const Element* gradient,
                                              std::uint64_t element_count) {
  for (std::uint64_t i = 0; i < element_count; ++i) {
    if (is_non_finite(load(gradient[i]))) return i;
  }
  return std::nullopt;
}

}  // namespace

void accumulate_gradient_reference(DType dtype, void* target, const void* source,
                                   std::uint64_t element_count) {
  check_dtype(dtype);
  const FloatEnvironment environment;
  if (dtype == DType::kFp32) {
    accumulate(static_cast<float*>(target), static_cast<const float*>(source), element_count);
  } else {
    accumulate(static_cast<std::uint16_t*>(target), static_cast<const std::uint16_t*>(source),
               element_count);
  }
}

void accumulate_gradient(DType dtype, void* target, const void* source,
                         std::uint64_t element_count) {
  check_dtype(dtype);
  const FloatEnvironment environment;
  active_simd_kernels().accumulate_gradient(dtype, target, source, element_count);
}

void add_squared_norm_reference(DType dtype, const void* gradient, std::uint64_t element_count,
                                NormAccumulator& total) {
  check_dtype(dtype);
  const FloatEnvironment environment;
  if (dtype == DType::kFp32) {
    add_leaves(static_cast<const float*>(gradient), element_count, total);
  } else {
    add_leaves(static_cast<const std::uint16_t*>(gradient), element_count, total);
  }
}

void add_squared_norm(DType dtype, const void* gradient, std::uint64_t element_count,
                      NormAccumulator& total) {
  check_dtype(dtype);
  const FloatEnvironment environment;
  active_simd_kernels().add_squared_norm(dtype, gradient, element_count, total);
}

std::optional<std::uint64_t> find_non_finite(DType dtype, const void* gradient,
                                             std::uint64_t element_count) {
  check_dtype(dtype);
  if (dtype == DType::kFp32)
    return first_non_finite(static_cast<const float*>(gradient), element_count);
  return first_non_finite(static_cast<const std::uint16_t*>(gradient), element_count);
}

}  // namespace sluice
