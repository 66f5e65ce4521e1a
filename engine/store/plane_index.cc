#include "engine/store/plane_index.h"

#include <fmt/format.h>

namespace sluice {

PlaneIndex::PlaneIndex(const Layout& layout, const Tiers& tiers)
    : layout_(layout),
      tiers_(tiers),
      first_activation_(2 * static_cast<std::uint32_t>(layout.blocks().size())),
      first_gradient_(first_activation_ + tiers.activation_piece_count()) {}

std::uint32_t PlaneIndex::index(BlockId block, Plane plane) const {
  if (plane == Plane::kActivation) return first_activation_ + index_of(block);
  if (plane == Plane::kGradient) return first_gradient_ + index_of(block);
  return 2 * index_of(block) + (plane == Plane::kRecord ? 1 : 0);
}

const Extent& PlaneIndex::extent(BlockId block, Plane plane, std::uint32_t copy) const {
  switch (plane) {
    case Plane::kParameter: return tiers_.parameter_extent(block, copy);
    case Plane::kRecord: return tiers_.record_extent(block, copy);
    case Plane::kGradient: return tiers_.gradient_extent(block);
    case Plane::kActivation: break;
  }
  return tiers_.activation_extent(index_of(block));
}

std::string PlaneIndex::describe(std::uint32_t plane) const {
  const auto describe_block = [this](BlockId id, std::string_view part) {
    const BlockPlace& block = layout_.block(id);
    const UnitPlace& unit = layout_.unit(block.unit);
    return fmt::format("unit \"{}\" block {} ({})", unit.name, index_of(id) - unit.first_block,
                       part);
  };
  if (plane >= first_gradient_)
    return describe_block(BlockId{plane - first_gradient_}, "gradients");
  if (plane >= first_activation_) return tiers_.describe_activation(plane - first_activation_);
  return describe_block(BlockId{plane / 2}, plane % 2 == 0 ? "parameters" : "optimizer state");
}

}  // namespace sluice
