#include "cpu_optim/gradient_ops.h"

#include <algorithm>
#include <array>

#include "base/float_environment.h"
#include "base/stored_elements.h"
#include "cpu_optim/simd_kernels.h"

namespace sluice {
namespace {

// A strip of a sum and that of its addend fit into a first-level cache together, 16 KiB in fp32.
constexpr std::uint64_t kStripElements = 8 * kNormLeafElements;

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
  const FloatEnvironment environment;
  with_element_type(dtype, [&]<class Element>(Element*) {
    accumulate(static_cast<Element*>(target), static_cast<const Element*>(source), element_count);
  });
}

void accumulate_gradient(DType dtype, void* target, const void* source,
                         std::uint64_t element_count) {
  const FloatEnvironment environment;
  active_simd_kernels().accumulate_gradient(dtype, target, source, element_count);
}

void add_squared_norm_reference(DType dtype, const void* gradient, std::uint64_t element_count,
                                NormAccumulator& total) {
  const FloatEnvironment environment;
  with_element_type(dtype, [&]<class Element>(Element*) {
    add_leaves(static_cast<const Element*>(gradient), element_count, total);
  });
}

void add_squared_norm(DType dtype, const void* gradient, std::uint64_t element_count,
                      NormAccumulator& total) {
  const FloatEnvironment environment;
  active_simd_kernels().add_squared_norm(dtype, gradient, element_count, total);
}

void accumulate_with_norm(DType dtype, void* target, const void* source,
                          std::uint64_t element_count, NormAccumulator& total) {
  const FloatEnvironment environment;
  const SimdKernels& kernels = active_simd_kernels();
  auto* const sum = static_cast<std::byte*>(target);
  const auto* const addend = static_cast<const std::byte*>(source);
  for (std::uint64_t begin = 0; begin < element_count; begin += kStripElements) {
    const std::uint64_t count = std::min(kStripElements, element_count - begin);
    const std::uint64_t begin_bytes = begin * size_of(dtype);
    kernels.accumulate_gradient(dtype, sum + begin_bytes, addend + begin_bytes, count);
    kernels.add_squared_norm(dtype, sum + begin_bytes, count, total);
  }
}

std::optional<std::uint64_t> find_non_finite(DType dtype, const void* gradient,
                                             std::uint64_t element_count) {
  return with_element_type(dtype, [&]<class Element>(Element*) {
    return first_non_finite(static_cast<const Element*>(gradient), element_count);
  });
}

}  // namespace sluice
