// These functions apply the element functions of sluice/dtype.h and base/optimizer_math.h to arrays
// on the GPU. The test optimizer_math_cuda_test compares the results with the CPU's results. Thread
// rule: one thread at a time may call the functions.
// The functions throw std::runtime_error if a CUDA call fails. The error names the failed call.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "base/optimizer_math.h"

namespace sluice::test {

// Returns the reason why kernels cannot run here. The text is empty if kernels can run here.
std::string why_no_gpu();

std::vector<std::uint32_t> gpu_float_bits_from_bf16(std::span<const std::uint16_t> values);
std::vector<std::uint32_t> gpu_float_bits_from_fp16(std::span<const std::uint16_t> values);
std::vector<std::uint16_t> gpu_bf16_from_float_bits(std::span<const std::uint32_t> bits);
std::vector<std::uint16_t> gpu_fp16_from_float_bits(std::span<const std::uint32_t> bits);
std::vector<SplitMaster> gpu_split_master(std::span<const std::uint32_t> bits);
std::vector<std::uint32_t> gpu_join_master(std::span<const SplitMaster> splits);

struct AdamInput {
  AdamElement state;
  float gradient;
};
// The coefficients for one step of an optimizer. The type of the coefficients selects the
// optimizer.
using ElementCoefficients = std::variant<AdamCoefficients, AdamL2Coefficients, LionCoefficients,
                                         AdagradCoefficients, SgdCoefficients>;
std::vector<AdamElement> gpu_update_elements(const ElementCoefficients& coefficients,
                                             std::span<const AdamInput> inputs);

}  // namespace sluice::test
