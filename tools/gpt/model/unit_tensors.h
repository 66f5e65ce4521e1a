// Provides the parameters and gradients of one unit as fp32. The engine may store parameters and
// gradients as bf16 or fp16. Tensors of bf16 and fp16 are converted in scratch memory. The scratch
// memory has room for the largest unit. Tensors of fp32 are used in place. If matrix products may
// have bf16 factors, matrices of bf16 are used in place, too.
// Thread rule: only one thread at a time may use the object. The object holds one unit at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include <sluice/dtype.h>
#include <sluice/model_spec.h>
#include "base/aligned_buffer.h"
#include "tools/gpt/model/compute_threads.h"
#include "tools/gpt/model/gpt_model.h"

namespace sluice::gpt {

// One address per tensor of a unit, in the order of UnitSpec::tensors. Each address is a multiple
// of 256 bytes. The memory must be valid during the call that receives the addresses.
using ParameterPointers = std::span<const std::byte* const>;
using GradientPointers = std::span<std::byte* const>;

// The element types in which the engine stores parameters and gradients.
struct Precision {
  DType parameters = DType::kFp32;
  DType gradients = DType::kFp32;
};

// A matrix product writes a gradient to this place.
struct GradientTarget {
  void* data = nullptr;
  DType dtype = DType::kFp32;
};

class UnitTensors {
 public:
  // `spec` and `threads` must outlive the object. If `bf16_factors` is true, matrices stay bf16.
  // Fails with kOutOfMemory if there is not enough memory.
  UnitTensors(const ModelSpec& spec, Precision precision, ComputeThreads& threads,
              bool bf16_factors = false);

  std::uint64_t scratch_bytes() const;
  static std::uint64_t scratch_bytes_of(const ModelSpec& spec, Precision precision,
                                        bool bf16_factors = false);
  Precision precision() const { return precision_; }

  // The results of parameter(i) and factor(i) are valid after this call, until the next call of
  // load().
  void load(std::uint32_t unit, ParameterPointers parameters);
  // Requires: if there are bf16 factors, the tensor is a vector.
  const float* parameter(std::uint32_t tensor) const { return parameters_[tensor]; }
  // Returns a matrix in the element type that matrix products need.
  const void* factor(std::uint32_t tensor) const {
    return bf16_factors_ ? factors_[tensor] : parameters_[tensor];
  }

  // The result of gradient(i) is valid from this call until store_gradients() is called. The
  // function store_gradients() writes the gradients to `gradients`. Between open_gradients() and
  // store_gradients(), the caller must write every element of the gradients.
  void open_gradients(std::uint32_t unit, GradientPointers gradients);
  float* gradient(std::uint32_t tensor) const { return gradients_[tensor]; }
  // Returns the place to which the caller writes a gradient that is one matrix product. If
  // possible, this place is the gradient's final place.
  GradientTarget product_gradient(std::uint32_t tensor);
  void store_gradients(GradientPointers gradients);

 private:
  const UnitSpec& unit(std::uint32_t index, std::size_t pointer_count) const;

  // Constant after construction.
  const ModelSpec& spec_;
  Precision precision_;
  ComputeThreads& threads_;
  const bool bf16_factors_;
  AlignedBuffer parameter_scratch_;
  AlignedBuffer gradient_scratch_;

  std::array<const float*, kBlockTensors> parameters_{};
  std::array<const void*, kBlockTensors> factors_{};
  std::array<float*, kBlockTensors> gradients_{};
  std::array<std::byte*, kBlockTensors> gradient_homes_{};
  std::array<bool, kBlockTensors> is_home_{};  // the gradient is already in its final place
  std::uint32_t gradient_unit_ = 0;
};

}  // namespace sluice::gpt
