#include "gpu/ranks/rank_group.h"

#include <numeric>
#include <optional>

#include <sluice/error.h>

namespace sluice {

RankGroup RankGroup::world(std::uint32_t rank, std::uint32_t rank_count) {
  RankGroup all{.members = std::vector<std::uint32_t>(rank_count), .rank = rank};
  std::iota(all.members.begin(), all.members.end(), 0u);
  return all;
}

RankGroup RankGroup::subgroup(std::span<const std::uint32_t> ranks) const {
  RankGroup group;
  std::optional<std::uint32_t> own;
  for (const std::uint32_t member : ranks) {
    SLUICE_CHECK(member < count(), "a group is made of the object's ranks");
    if (member == rank) own = group.count();
    group.members.push_back(members[member]);
  }
  SLUICE_CHECK(own.has_value(), "a rank opens groups that it is in");
  group.rank = *own;
  return group;
}

}  // namespace sluice
