// The index gives a number to each plane that a block store moves. The index knows the place and
// the name of each plane. The first numbers are for the two planes of each block. The next numbers
// are for the pieces of activations, one plane for each piece. The last numbers are for the
// gradients, one plane for each block.
//
// Thread rule: the object is constant after construction, and any thread may use it.
#pragma once

#include <cstdint>
#include <string>

#include "engine/plan/layout.h"
#include "engine/store/tiers.h"

namespace sluice {

// The kinds of planes. A block of state has two planes: the compute parameters, and the optimizer's
// record. Storage has two further kinds of data: the gradients of a block, and pieces of
// activations. The pieces of activations do not belong to blocks. The class Tiers gives numbers to
// the pieces of activations. Each new content of a plane is a new version of the plane.
enum class Plane : std::uint8_t { kParameter, kRecord, kActivation, kGradient };

class PlaneIndex {
 public:
  // All arguments must outlive the object.
  PlaneIndex(const Layout& layout, const Tiers& tiers);

  std::uint32_t count() const { return first_gradient_ + tiers_.gradient_extent_count(); }
  std::uint32_t index(BlockId block, Plane plane) const;
  // Returns whether the plane is a part of the state.
  bool is_state(std::uint32_t plane) const { return plane < first_activation_; }
  // Returns the extent on storage that holds one copy of the plane. A plane of the state may have
  // several copies on storage.
  const Extent& extent(BlockId block, Plane plane, std::uint32_t copy) const;
  // Describes the plane in words, for messages.
  std::string describe(std::uint32_t plane) const;

 private:
  const Layout& layout_;
  const Tiers& tiers_;
  const std::uint32_t first_activation_;
  const std::uint32_t first_gradient_;
};

}  // namespace sluice
