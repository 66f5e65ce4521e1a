// The vector kernels, and the choice of the kernels that this process uses. The source of the
// kernels is compiled once per instruction set. The header is internal to cpu_optim and its tests.
// Other code calls update_simd(), accumulate_gradient() and add_squared_norm(), which also set the
// floating-point environment. The functions change only their outputs, so any thread may call them.
//
// Invariant: every kernel gives the bits of the scalar definition (base/optimizer_math.h,
// gradient_ops.h) for all results that are not NaN. If the definition gives NaN, the kernel gives
// NaN, too, but the sign and the payload may differ.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include <sluice/dtype.h>
#include "base/norm_accumulator.h"
#include "base/ordered_sum.h"
#include "cpu_optim/update.h"
#include "cpu_optim/update_encoded.h"

namespace sluice {

// The result of a vector kernel. The kernel handles elements [0, element_count) of its arrays. The
// scalar definition handles the remaining elements, which fill less than two vectors.
struct VectorResult {
  std::string_view target_name;  // the instruction set of the compiled kernel
  std::uint64_t element_count = 0;
  NewState state = NewState::kFinite;
};

// The kernels of one instruction set. Each kernel returns the name of its instruction set, so that
// a test can tell which kernel ran. Each array is aligned at least for its element type.
struct SimdKernels {
  std::int64_t highway_target;  // Highway's bit for the set
  std::string_view target_name;
  VectorResult (*adam)(const AdamCoefficients& coefficients, const UpdateArrays& arrays);
  VectorResult (*adam_l2)(const AdamL2Coefficients& coefficients, const UpdateArrays& arrays);
  VectorResult (*lion)(const LionCoefficients& coefficients, const UpdateArrays& arrays);
  VectorResult (*adagrad)(const AdagradCoefficients& coefficients, const UpdateArrays& arrays);
  VectorResult (*sgd)(const SgdCoefficients& coefficients, const UpdateArrays& arrays);
  // Updates bf16 moments directly, without fp32 arrays for intermediate results. The kernel handles
  // fp32 parameters with fp32 gradients, and split masters with fp32 or bf16 gradients. The words
  // of base/moment_rounding.h must be the same for all elements. The pointer is null if the kernel
  // would not be faster than the other kernels of this instruction set.
  VectorResult (*adam_bf16)(const AdamCoefficients& coefficients, const UpdateArrays& arrays);
  void (*move)(const UpdateArrays& arrays, std::uint32_t seed);
  // Rounds new moments to bf16. All elements share `words`. `first_element` holds the low 32 bits
  // of the first element's index. Returns the number of elements that the kernel has rounded; the
  // scalar definition handles the rest.
  std::uint64_t (*round_vectors)(const FreshMoments& moments, const UpdateArrays& target,
                                 RoundingWords words, std::uint32_t first_element);
  // The next two kernels encode or decode moments in whole groups. Each kernel returns the number
  // of elements that it has handled. The kernel stops before a group that it cannot handle, or
  // before a last part that is shorter than a group. The scalar definition handles the elements
  // after that point. A pointer is null if the kernel of this instruction set would not be faster
  // than the definition.
  std::uint64_t (*encode_code_groups)(CodeBook book, const float* values,
                                      std::uint64_t element_count, const MomentCodes& moment);
  std::uint64_t (*decode_code_groups)(CodeBook book, const MomentCodes& moment,
                                      std::uint64_t element_count, float* values);
  std::string_view (*accumulate_gradient)(DType dtype, void* target, const void* source,
                                          std::uint64_t element_count);
  std::string_view (*add_squared_norm)(DType dtype, const void* gradient,
                                       std::uint64_t element_count, NormAccumulator& total);
  // Returns the number of elements that were summed. The scalar definition handles the rest.
  std::uint64_t (*sum_vectors)(const OrderedSum& sum);

  // The next functions handle all elements. These functions first use vectors, and then use the
  // scalar definition for the remaining elements.
  VectorResult update(const UpdateCoefficients& coefficients, const UpdateArrays& arrays) const;
  void round_moments(const FreshMoments& moments, const UpdateArrays& target) const;
  void encode_codes(CodeBook book, std::span<const float> values, const MomentCodes& moment) const;
  void decode_codes(CodeBook book, const MomentCodes& moment, std::span<float> values) const;
  void sum_in_order(const OrderedSum& sum) const;
};

// The kernels that this build contains and this processor can run. The best kernels are first. The
// list is never empty.
std::span<const SimdKernels> available_simd_kernels();

// Returns the kernels with the name `name`, which may be in upper or lower case. If `name` is
// empty, the function returns the best kernels. Fails with kConfig if no kernels of this name are
// available. The message lists the available names.
const SimdKernels& select_simd_kernels(std::string_view name);

// Returns the kernels that this process uses. The call chooses the kernels with
// select_simd_kernels(). The name comes from the environment variable SLUICE_SIMD, which is read at
// the first call. Every call fails with kConfig if SLUICE_SIMD names no available kernels.
const SimdKernels& active_simd_kernels();

}  // namespace sluice
