// The operations on gradients and state in device memory: accumulation, the squared norm, and the
// optimizers. Every result has the same bits as the result of the scalar definitions
// (sluice/dtype.h, base/optimizer_math.h, base/norm_accumulator.h). The functions for the CPU give
// results with the same bits. Only the sign and the payload of a NaN may differ.
//
// Thread rule: the same as for Device. Every call enqueues its work and returns. Later work on the
// same stream may reuse the memory. Arrays are device memory and do not overlap. All arrays except
// the scales of codes are aligned to 16 bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <variant>

#include <sluice/device.h>
#include <sluice/dtype.h>
#include "base/moment_rounding.h"
#include "base/optimizer_math.h"

namespace sluice {

// The coefficients of one step. The type of the coefficients selects the optimizer.
using DeviceCoefficients = std::variant<AdamCoefficients, AdamL2Coefficients, LionCoefficients,
                                        AdagradCoefficients, SgdCoefficients>;

// A run of elements that share hyperparameters and are updated in place.
struct DeviceUpdate {
  // With kFp32, `parameter` is the master. With kBf16, `parameter` and `low` together are the
  // master (split_master). With kFp16, the update rounds `master` to `parameter`, and never reads
  // `parameter`.
  DType parameter_type = DType::kFp32;
  DType gradient_type = DType::kFp32;
  void* parameter = nullptr;
  std::int16_t* low = nullptr;
  float* master = nullptr;
  float* exp_avg = nullptr;  // null if the optimizer does not keep this moment
  float* exp_avg_sq = nullptr;
  // The 8-bit codes that replace fp32 moments, and one scale for each group of kMomentGroupElements
  // elements (base/moment_codes.h). Scales have only the alignment of a float.
  std::uint8_t* exp_avg_codes = nullptr;
  float* exp_avg_scales = nullptr;
  std::uint8_t* exp_avg_sq_codes = nullptr;
  float* exp_avg_sq_scales = nullptr;
  // The random bits of bf16 moments depend on the position of the elements in their tensor
  // (base/moment_rounding.h).
  std::uint16_t* exp_avg_bf16 = nullptr;
  std::uint16_t* exp_avg_sq_bf16 = nullptr;
  MomentRounding rounding = {};
  const void* gradient = nullptr;
  std::uint64_t element_count = 0;
  // The update sets this word to 1 if a new master, a rounded parameter or a new moment is not
  // finite. Otherwise the word stays unchanged.
  std::uint32_t* non_finite = nullptr;
};

inline constexpr std::uint64_t kDigestBytes = 8192;

class DeviceMath {
 public:
  DeviceMath() = default;
  DeviceMath(const DeviceMath&) = delete;
  DeviceMath& operator=(const DeviceMath&) = delete;
  virtual ~DeviceMath() = default;

  // target[i] = round(float(target[i]) + float(source[i])).
  virtual void accumulate(DType type, void* target, const void* source, std::uint64_t element_count,
                          StreamId stream) = 0;
  // leaves[i] = the sum of the squares of the elements of leaf i. The squares are added in fp64 in
  // the same order as on the CPU. These sums are for NormAccumulator::add(). If the last leaf is
  // shorter than the others, zeros stand for the missing elements.
  virtual void norm_leaves(DType type, const void* gradient, std::uint64_t element_count,
                           double* leaves, StreamId stream) = 0;
  virtual void update(const DeviceCoefficients& coefficients, const DeviceUpdate& arrays,
                      StreamId stream) = 0;
  // digests[i] = a number for the bytes [i * kDigestBytes, (i + 1) * kDigestBytes) of `values`. The
  // last of these pieces may be shorter. Two pieces that differ in a single word of 8 bytes have
  // different numbers. Other pieces that differ have the same number with a probability of 2^-64.
  virtual void digest(const void* values, std::uint64_t size_bytes, std::uint64_t* digests,
                      StreamId stream) = 0;
};

}  // namespace sluice
