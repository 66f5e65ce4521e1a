#include "gpu/ranks/integer_reduction.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace sluice {

void combine_integers(const AllReduceIntegers& operation, std::uint64_t first, std::uint64_t count,
                      const std::byte* source, std::byte* target) {
  for (std::uint64_t i = 0; i < count; ++i) {
    std::uint64_t own = 0, other = 0;
    std::memcpy(&own, target + i * sizeof own, sizeof own);
    std::memcpy(&other, source + i * sizeof other, sizeof other);
    own = first + i < operation.sum_count ? own + other : std::min(own, other);
    std::memcpy(target + i * sizeof own, &own, sizeof own);
  }
}

std::vector<IntegerRound> integer_rounds(std::uint32_t rank, std::uint32_t rank_count,
                                         std::uint32_t direct_ranks_max) {
  std::vector<IntegerRound> rounds;
  if (rank_count == 1) return rounds;
  if (rank_count <= direct_ranks_max) {
    IntegerRound& all = rounds.emplace_back();
    for (std::uint32_t i = 1; i < rank_count; ++i) all.targets.push_back((rank + i) % rank_count);
    all.sources = all.targets;
    return rounds;
  }
  const std::uint32_t paired = std::bit_floor(rank_count);
  if (rank >= paired) {
    rounds.push_back({.targets = {rank - paired}});
    rounds.push_back({.sources = {rank - paired}, .replaces = true});
    return rounds;
  }
  const bool speaks_for_another = rank + paired < rank_count;
  if (speaks_for_another) rounds.push_back({.sources = {rank + paired}});
  for (std::uint32_t bit = 1; bit < paired; bit *= 2)
    rounds.push_back({.targets = {rank ^ bit}, .sources = {rank ^ bit}});
  if (speaks_for_another) rounds.push_back({.targets = {rank + paired}});
  return rounds;
}

}  // namespace sluice
