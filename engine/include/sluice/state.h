// Applications use these types to set and read the training state, tensor by tensor. Plain data.
#pragma once

#include <bit>
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
  std::uint32_t hyperparameter_set = 0;  // tensors with equal hyperparameters have the same set
  bool is_opaque = false;                // its elements are words of an opaque unit
};

enum class StateKind : std::uint8_t {
  kParameter,  // compute dtype
  kMaster,     // fp32
  kExpAvg,     // fp32
  kExpAvgSq,   // fp32
};
SLUICE_EXPORT std::string_view name_of(StateKind kind);

// float_of_word() converts a word of an opaque unit to a float that carries the word.
// word_of_float() converts such a float back to the word. The word is in the highest bits of the
// float's representation. `word_bytes` is the size of a parameter, 2 or 4.
inline float float_of_word(std::uint32_t word, std::uint64_t word_bytes) {
  return std::bit_cast<float>(word << (32 - 8 * word_bytes));
}
inline std::uint32_t word_of_float(float carrier, std::uint64_t word_bytes) {
  return std::bit_cast<std::uint32_t>(carrier) >> (32 - 8 * word_bytes);
}

// A function of this type gives the initial fp32 masters of a tensor. The function fills `values`
// with the masters of elements [first_element, first_element + values.size()).
// For a tensor of an opaque unit, each value is the float_of_word() of one word.
using InitialValues = std::function<void(const TensorPlace& tensor, std::uint64_t first_element,
                                         std::span<float> values)>;

}  // namespace sluice
