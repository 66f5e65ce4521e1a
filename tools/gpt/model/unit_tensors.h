// One unit's parameters and gradients as fp32, whatever their element type at rest: bf16 and fp16
// tensors pass through scratch memory that is sized once for the largest unit, fp32 tensors are
// used where they lie. Not thread-safe: one unit at a time.
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

// One address per tensor of a unit, in the order of UnitSpec::tensors, aligned to 256 bytes as in
// every placement. The memory must stay until the call that receives them returns.
using ParameterPointers = std::span<const std::byte* const>;
using GradientPointers = std::span<std::byte* const>;

// Element types at rest.
struct Precision {
  DType parameters = DType::kFp32;
  DType gradients = DType::kFp32;
};

class UnitTensors {
 public:
  // `spec` and `threads` must outlive this.
  // Fails with: kOutOfMemory.
  UnitTensors(const ModelSpec& spec, Precision precision, ComputeThreads& threads);

  std::uint64_t scratch_bytes() const;
  static std::uint64_t scratch_bytes_of(const ModelSpec& spec, Precision precision);
  Precision precision() const { return precision_; }

  // Makes parameter(i) valid until the next load.
  void load(std::uint32_t unit, ParameterPointers parameters);
  const float* parameter(std::uint32_t tensor) const { return parameters_[tensor]; }

  // Makes gradient(i) valid until store_gradients(), which writes them to where they belong. Every
  // element has to be written in between.
  void open_gradients(std::uint32_t unit, GradientPointers gradients);
  float* gradient(std::uint32_t tensor) const { return gradients_[tensor]; }
  void store_gradients(GradientPointers gradients);

 private:
  const UnitSpec& unit(std::uint32_t index, std::size_t pointer_count) const;

  // Constant after construction.
  const ModelSpec& spec_;
  Precision precision_;
  ComputeThreads& threads_;
  AlignedBuffer parameter_scratch_;
  AlignedBuffer gradient_scratch_;

  std::array<const float*, kBlockTensors> parameters_{};
  std::array<float*, kBlockTensors> gradients_{};
  std::uint32_t gradient_unit_ = 0;
};

}  // namespace sluice::gpt
