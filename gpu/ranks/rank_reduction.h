// The struct describes a reduction from the point of view of one rank. For each rank, the struct
// says which elements of the source the rank adds. The additions run in rank order
// (base/ordered_sum.h). The struct does not depend on the way in which ranks exchange their
// sources.
//
// Thread rule: the structs are values.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <sluice/collectives.h>
#include <sluice/dtype.h>
#include <sluice/units.h>
#include "gpu/ranks/element_range.h"

namespace sluice {

struct RankReduction {
  // Each range of an all_reduce begins at a multiple of this number, so that no range begins inside
  // a vector.
  static constexpr std::uint64_t kElementsAlign = 64;

  const std::byte* source = nullptr;
  DType source_type = DType::kFp32;
  std::byte* target = nullptr;  // where the sum of the rank's own range goes
  DType target_type = DType::kFp32;
  std::uint64_t share = 0;  // the number of elements in the longest range
  std::uint64_t count = 0;  // the number of all elements
  std::string_view kind;
  std::string_view subject;

  ElementRange range(std::uint32_t rank) const {
    return {std::min(rank * share, count), std::min((rank + 1) * share, count)};
  }
  // Returns piece number i of the rank's range. Each piece has `step` elements; the last piece may
  // be shorter.
  ElementRange piece(std::uint32_t rank, std::uint64_t i, std::uint64_t step) const {
    const ElementRange all = range(rank);
    return {std::min(all.begin + i * step, all.end), std::min(all.begin + (i + 1) * step, all.end)};
  }
  const std::byte* source_of(ElementRange elements) const {
    return source + elements.begin * size_of(source_type);
  }
  std::uint64_t source_bytes(ElementRange elements) const {
    return elements.count() * size_of(source_type);
  }
  // Returns the address for the sum of `piece`. The piece is in the range of `rank`.
  std::byte* target_of(ElementRange piece, std::uint32_t rank) const {
    return target + (piece.begin - range(rank).begin) * size_of(target_type);
  }
};

inline RankReduction reduction_of(const ReduceScatter& operation, std::uint32_t rank_count) {
  return {.source = operation.source,
          .source_type = operation.source_type,
          .target = operation.target,
          .target_type = operation.target_type,
          .share = operation.shard_elements,
          .count = operation.shard_elements * rank_count,
          .kind = "reduce_scatter",
          .subject = operation.subject};
}

// The first half of an all-reduce. In the first half of an all-reduce, each rank adds its share in
// place.
inline RankReduction reduction_of(const AllReduce& operation, std::uint32_t rank,
                                  std::uint32_t rank_count) {
  RankReduction reduction{.source = operation.data,
                          .source_type = operation.type,
                          .target_type = operation.type,
                          .share = align_up(div_ceil(operation.element_count, rank_count),
                                            RankReduction::kElementsAlign),
                          .count = operation.element_count,
                          .kind = "all_reduce",
                          .subject = operation.subject};
  reduction.target = operation.data + reduction.range(rank).begin * size_of(operation.type);
  return reduction;
}

}  // namespace sluice
