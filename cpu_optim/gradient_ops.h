// These functions work on gradients on the CPU, before the optimizer runs. The functions accumulate
// gradients over micro-batches, and compute the squared norm. Results depend only on the arguments.
// Any thread may call the functions on disjoint memory. The *_reference functions are the scalar
// definitions. The other functions are faster and give the same bits. simd_target_name() returns
// the name of the instruction set that the faster functions use. Each array is aligned at least for
// its element type. The caller's floating-point environment has no effect on any result and stays
// unchanged. The sign and the payload of a NaN result may differ from those of the definition.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include <sluice/dtype.h>
#include "base/norm_accumulator.h"

namespace sluice {

// target[i] = round(float(target[i]) + float(source[i])), with one fp32 addition and one rounding
// to `dtype` (nearest, ties to even). Both arrays hold `element_count` elements and do not overlap.
void accumulate_gradient_reference(DType dtype, void* target, const void* source,
                                   std::uint64_t element_count);
void accumulate_gradient(DType dtype, void* target, const void* source,
                         std::uint64_t element_count);

// Adds the squared norm of `gradient` to `total`, leaf by leaf. A leaf is summed in 8 lanes. Lane j
// adds the squares of elements j, j+8, j+16, ... in this order, in fp64. Each square is exact in
// fp64. The lanes are then added as ((0+4)+(2+6))+((1+5)+(3+7)). A last leaf with fewer than 256
// elements is summed as if it were padded with zeros. `gradient` starts at a leaf boundary.
void add_squared_norm_reference(DType dtype, const void* gradient, std::uint64_t element_count,
                                NormAccumulator& total);
void add_squared_norm(DType dtype, const void* gradient, std::uint64_t element_count,
                      NormAccumulator& total);

// Calls accumulate_gradient(), and adds the squared norm of the new `target` to `total`. The
// function goes through the arrays in strips, so it reads each strip of the sum from the cache. The
// bits are those of accumulate_gradient() and add_squared_norm() on the whole arrays. `target`
// starts at a leaf boundary.
void accumulate_with_norm(DType dtype, void* target, const void* source,
                          std::uint64_t element_count, NormAccumulator& total);

// Returns the index of the first NaN or infinity, if any. The function may be slow, because only
// the message about a non-finite norm needs this index.
std::optional<std::uint64_t> find_non_finite(DType dtype, const void* gradient,
                                             std::uint64_t element_count);

}  // namespace sluice
