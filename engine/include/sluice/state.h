// The training state, tensor by tensor, as applications set and read it. Plain data.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include <sluice/export.h>
#include <sluice/ids.h>

namespace sluice {

struct TensorPlace {
  TensorId id{};
  UnitId unit{};
  std::string name;
  std::uint64_t offset_elements = 0;     // in the unit
  std::uint64_t element_count = 0;       // without padding
  std::uint32_t hyperparameter_set = 0;  // see engine/plan/parameter_groups.h
};

enum class StateKind : std::uint8_t {
  kParameter,  // compute dtype
  kMaster,     // fp32
  kExpAvg,     // fp32
  kExpAvgSq,   // fp32
};
SLUICE_EXPORT std::string_view name_of(StateKind kind);

// Fills `values` with the initial fp32 masters of elements [first_element, first_element +
// values.size()) of a tensor.
using InitialValues = std::function<void(const TensorPlace& tensor, std::uint64_t first_element,
                                         std::span<float> values)>;

}  // namespace sluice
