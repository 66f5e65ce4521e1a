// This header defines the ids of units, tensors and blocks. Each kind of id has its own type, so
// the compiler rejects an id of the wrong kind. Ids start at 0 and follow the order of the model.
// Unit ids follow the order of ModelSpec::units. Tensor ids and block ids are counted over all
// units, in the order of the units.
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
