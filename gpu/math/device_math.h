// The operations on gradients and state that live on the device: conversions, accumulation, the
// squared norm, unscaling, and the optimizers. Every result has the bits of the scalar definitions
// (sluice/dtype.h, base/optimizer_math.h, base/norm_accumulator.h), as on the CPU; a NaN may differ
// in sign and payload.
//
// Thread rule: as Device. Every call enqueues and returns; memory may be reused by later work on
// the same stream. Arrays are device memory, aligned to 16 bytes, and do not overlap.
#pragma once

#include <cstdint>
#include <memory>
#include <variant>

#include <sluice/cuda_device.h>
#include <sluice/device.h>
#include <sluice/dtype.h>
#include "base/optimizer_math.h"

namespace sluice {

// The coefficients of one step; the alternative says which optimizer.
using DeviceCoefficients = std::variant<AdamCoefficients, AdamL2Coefficients, LionCoefficients,
                                        AdagradCoefficients, SgdCoefficients>;

// A run of elements that share hyperparameters, updated in place.
struct DeviceUpdate {
  // kFp32: `parameter` is the master. kBf16: `parameter` and `low` make up the master
  // (split_master). kFp16: `parameter` is rounded from `master`, written and never read.
  DType parameter_type = DType::kFp32;
  DType gradient_type = DType::kFp32;
  void* parameter = nullptr;
  std::int16_t* low = nullptr;
  float* master = nullptr;
  float* exp_avg = nullptr;  // null if the optimizer keeps none; so is the next
  float* exp_avg_sq = nullptr;
  const void* gradient = nullptr;
  std::uint64_t element_count = 0;
  // Set to 1 when a new master, the parameter rounded from it, or a moment is not finite; otherwise
  // left alone.
  std::uint32_t* non_finite = nullptr;
};

// Elements per leaf of the norm, counted from the start of a unit (cpu_optim/gradient_ops.h).
inline constexpr std::uint64_t kDeviceLeafElements = 256;

class DeviceMath {
 public:
  DeviceMath() = default;
  DeviceMath(const DeviceMath&) = delete;
  DeviceMath& operator=(const DeviceMath&) = delete;
  virtual ~DeviceMath() = default;

  virtual void convert(DType to, void* target, DType from, const void* source,
                       std::uint64_t element_count, StreamId stream) = 0;
  // target[i] = round(float(target[i]) + float(source[i])).
  virtual void accumulate(DType type, void* target, const void* source, std::uint64_t element_count,
                          StreamId stream) = 0;
  // values[i] = round(float(values[i]) * factor). Sets *overflow to 1 when a result is not finite.
  virtual void unscale(DType type, void* values, float factor, std::uint64_t element_count,
                       std::uint32_t* overflow, StreamId stream) = 0;
  // leaves[i] = the sum of the squares of leaf i, in fp64, in the CPU's tree; pass them to
  // NormAccumulator::add(). A last, shorter leaf counts as if padded with zeros.
  virtual void norm_leaves(DType type, const void* gradient, std::uint64_t element_count,
                           double* leaves, StreamId stream) = 0;
  virtual void update(const DeviceCoefficients& coefficients, const DeviceUpdate& arrays,
                      StreamId stream) = 0;
};

// `device` must outlive it; the same holds below.
// Fails with: kUnsupported when this build has no code for the GPU.
std::unique_ptr<DeviceMath> make_cuda_math(CudaDevice& device);
// Makes the kind that `device` needs; on the host device one thread computes, element by element.
std::unique_ptr<DeviceMath> make_device_math(Device& device);

}  // namespace sluice
