#include <sluice/state_source.h>

#include <algorithm>

#include "base/float_environment.h"

namespace sluice {

std::string_view name_of(StateKind kind) {
  switch (kind) {
    case StateKind::kParameter: return "parameter";
    case StateKind::kMaster: return "master";
    case StateKind::kExpAvg: return "exp_avg";
    case StateKind::kExpAvgSq: break;
  }
  return "exp_avg_sq";
}

StateDescription describe_state(const ModelSpec& model, DType parameter, OptimizerKind optimizer,
                                OptimizerState moments) {
  StateDescription description{
      .tensors = {}, .parameter = parameter, .optimizer = optimizer, .moments = moments};
  for (const UnitSpec& unit : model.units) {
    for (const TensorSpec& tensor : unit.tensors)
      description.tensors.push_back({.name = tensor.name,
                                     .shape = tensor.shape,
                                     .is_frozen = unit.is_frozen,
                                     .is_opaque = unit.is_opaque});
  }
  return description;
}

void InitialSource::read(const TensorPlace& tensor, StateKind kind, std::uint64_t first_element,
                         std::span<float> values) {
  if (kind == StateKind::kMaster) {
    const FloatEnvironment environment;  // the function may change it
    return values_(tensor, first_element, values);
  }
  std::ranges::fill(values, 0.0f);
}

}  // namespace sluice
