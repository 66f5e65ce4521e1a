// A group consists of some ranks of a world. All members of the group have the same list of ranks,
// in the same order. The group also has this rank's place in the list.
//
// Thread rule: the struct is a value.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace sluice {

struct RankGroup {
  std::vector<std::uint32_t> members;  // the members' numbers in the world
  std::uint32_t rank = 0;              // this rank's place among the members

  // All ranks of a world.
  static RankGroup world(std::uint32_t rank, std::uint32_t rank_count);

  std::uint32_t count() const { return static_cast<std::uint32_t>(members.size()); }
  // Returns a smaller group. `ranks` lists the places that the members of the smaller group have in
  // this group. Requires: this rank is a member of the smaller group.
  RankGroup subgroup(std::span<const std::uint32_t> ranks) const;
};

}  // namespace sluice
