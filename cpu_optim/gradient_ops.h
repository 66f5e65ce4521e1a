// The operations on a gradient between the device and the optimizer: accumulation over
// micro-batches and the squared norm. Pure in their arguments: callable from any thread on disjoint
// memory. The *_reference functions are the scalar definitions; the others give the same bits,
// faster (simd_target_name() says which instruction set they use). Arrays are aligned at least to
// their element. As in update.h, the caller's floating-point environment does not matter and stays
// as it is, and a NaN may differ in sign and payload.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include <sluice/dtype.h>
#include "base/norm_accumulator.h"

namespace sluice {

// Elements per leaf of the norm. A leaf starts at a multiple of this number, counted from the start
// of the unit.
inline constexpr std::uint64_t kNormLeafElements = 256;

// target[i] = round(float(target[i]) + float(source[i])): one fp32 addition, one rounding to
// `dtype` (nearest, ties to even). Both arrays hold `element_count` elements and do not overlap.
void accumulate_gradient_reference(DType dtype, void* target, const void* source,
                                   std::uint64_t element_count);
void accumulate_gradient(DType dtype, void* target, const void* source,
                         std::uint64_t element_count);

// Adds the squared norm of `gradient` to `total`, leaf by leaf. Inside a leaf, lane j of 8 sums the
// squares of elements j, j+8, j+16, ... in order, in fp64 (each square is exact there); the lanes
// are then added as ((0+4)+(2+6))+((1+5)+(3+7)). A last leaf shorter than 256 counts as if padded
// with zeros. `gradient` starts at a leaf boundary.
void add_squared_norm_reference(DType dtype, const void* gradient, std::uint64_t element_count,
                                NormAccumulator& total);
void add_squared_norm(DType dtype, const void* gradient, std::uint64_t element_count,
                      NormAccumulator& total);

// Returns the index of the first NaN or infinity, if any. It explains a non-finite norm, so its
// speed does not matter.
std::optional<std::uint64_t> find_non_finite(DType dtype, const void* gradient,
                                             std::uint64_t element_count);

}  // namespace sluice
