// The ids of units, tensors and blocks as types, so that one cannot be passed for another. Each
// counts from 0 in model order: units in the order of ModelSpec::units, tensors and blocks across
// all units in that same order.
#pragma once

#include <cstdint>

namespace sluice {

enum class UnitId : std::uint32_t {};
enum class TensorId : std::uint32_t {};
enum class BlockId : std::uint32_t {};

constexpr std::uint32_t index_of(UnitId id) {
  return static_cast<std::uint32_t>(id);
}
constexpr std::uint32_t index_of(TensorId id) {
  return static_cast<std::uint32_t>(id);
}
constexpr std::uint32_t index_of(BlockId id) {
  return static_cast<std::uint32_t>(id);
}

}  // namespace sluice
