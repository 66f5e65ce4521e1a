#include "tools/gpt/model/unit_tensors.h"

#include <algorithm>

#include <sluice/error.h>
#include <sluice/units.h>
#include "tools/gpt/model/layers.h"

namespace sluice::gpt {
namespace {

constexpr std::uint64_t kTensorAlignment = 256;

std::uint64_t scratch_bytes_of_tensor(const TensorSpec& tensor) {
  return align_up(tensor.element_count() * sizeof(float), kTensorAlignment);
}

bool is_matrix(const TensorSpec& tensor) {
  return tensor.shape.size() > 1;
}

template <class Taken>
std::uint64_t largest_unit_bytes(const ModelSpec& spec, const Taken& taken) {
  std::uint64_t largest = 0;
  for (const UnitSpec& unit : spec.units) {
    std::uint64_t bytes = 0;
    for (const TensorSpec& tensor : unit.tensors)
      if (taken(tensor)) bytes += scratch_bytes_of_tensor(tensor);
    largest = std::max(largest, bytes);
  }
  return largest;
}

std::uint64_t parameter_bytes(const ModelSpec& spec, Precision precision, bool bf16_factors) {
  if (precision.parameters == DType::kFp32) return 0;
  return largest_unit_bytes(
      spec, [&](const TensorSpec& tensor) { return !bf16_factors || !is_matrix(tensor); });
}

std::uint64_t gradient_bytes(const ModelSpec& spec, Precision precision) {
  if (precision.gradients == DType::kFp32) return 0;
  return largest_unit_bytes(spec, [](const TensorSpec&) { return true; });
}

}  // namespace

std::uint64_t UnitTensors::scratch_bytes_of(const ModelSpec& spec, Precision precision,
                                            bool bf16_factors) {
  return parameter_bytes(spec, precision, bf16_factors) + gradient_bytes(spec, precision);
}

UnitTensors::UnitTensors(const ModelSpec& spec, Precision precision, ComputeThreads& threads,
                         bool bf16_factors)
    : spec_(spec), precision_(precision), threads_(threads), bf16_factors_(bf16_factors) {
  SLUICE_CHECK(!bf16_factors || precision.parameters == DType::kBf16, "bf16 factors lie there");
  if (const std::uint64_t bytes = parameter_bytes(spec, precision, bf16_factors); bytes != 0)
    parameter_scratch_ = AlignedBuffer(bytes, "fp32 copy of a unit's parameters");
  if (const std::uint64_t bytes = gradient_bytes(spec, precision); bytes != 0)
    gradient_scratch_ = AlignedBuffer(bytes, "fp32 gradients of a unit");
}

std::uint64_t UnitTensors::scratch_bytes() const {
  return parameter_scratch_.size_bytes() + gradient_scratch_.size_bytes();
}

const UnitSpec& UnitTensors::unit(std::uint32_t index, std::size_t pointer_count) const {
  const UnitSpec& unit = spec_.units[index];
  SLUICE_CHECK(pointer_count == unit.tensors.size(), "one pointer per tensor of the unit");
  return unit;
}

void UnitTensors::load(std::uint32_t unit_index, ParameterPointers parameters) {
  const UnitSpec& spec = unit(unit_index, parameters.size());
  std::byte* scratch = parameter_scratch_.data();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (precision_.parameters == DType::kFp32) {
      parameters_[i] = reinterpret_cast<const float*>(parameters[i]);
      continue;
    }
    factors_[i] = parameters[i];
    parameters_[i] = nullptr;
    if (bf16_factors_ && is_matrix(spec.tensors[i])) continue;
    auto* target = reinterpret_cast<float*>(scratch);
    widen(threads_, precision_.parameters, parameters[i], target, spec.tensors[i].element_count());
    parameters_[i] = target;
    scratch += scratch_bytes_of_tensor(spec.tensors[i]);
  }
}

void UnitTensors::open_gradients(std::uint32_t unit_index, GradientPointers gradients) {
  const UnitSpec& spec = unit(unit_index, gradients.size());
  gradient_unit_ = unit_index;
  std::byte* scratch = gradient_scratch_.data();
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const bool in_place = precision_.gradients == DType::kFp32;
    gradients_[i] = reinterpret_cast<float*>(in_place ? gradients[i] : scratch);
    gradient_homes_[i] = gradients[i];
    is_home_[i] = in_place;
    if (!in_place) scratch += scratch_bytes_of_tensor(spec.tensors[i]);
  }
}

GradientTarget UnitTensors::product_gradient(std::uint32_t tensor) {
  if (!bf16_factors_ || precision_.gradients == DType::kFp16)
    return {gradients_[tensor], DType::kFp32};
  is_home_[tensor] = true;
  return {gradient_homes_[tensor], precision_.gradients};
}

void UnitTensors::store_gradients(GradientPointers gradients) {
  if (precision_.gradients == DType::kFp32) return;
  const UnitSpec& spec = unit(gradient_unit_, gradients.size());
  for (std::size_t i = 0; i < gradients.size(); ++i)
    if (!is_home_[i])
      round_to(threads_, precision_.gradients, gradients_[i], gradients[i],
               spec.tensors[i].element_count());
}

}  // namespace sluice::gpt
