// The steps of an exact reduction (gpu/ranks/nccl_collectives.h). In each step, a rank receives one
// piece from every other rank. The rank stores these pieces in its staging memory, and adds them.
// If the staging memory has two halves, the pieces of one step arrive while the pieces of the
// previous step are added. The functions are pure.
//
// For example, 1,024 ranks share 2^33 bf16 elements. Each rank has 2^23 elements, which take 16
// MiB. The staging memory of 1,023 MiB has two halves, each with 512 KiB for every other rank. So
// there are 32 steps with messages of 512 KiB.
#pragma once

#include <algorithm>
#include <cstdint>

#include <sluice/error.h>
#include <sluice/units.h>
#include "gpu/ranks/element_range.h"

namespace sluice {

// The smallest size of the staging memory. With less memory, a reduction over a few ranks would
// need more kernels.
inline constexpr std::uint64_t kStagingBytesMin = 8_MiB;
// Each half of the staging memory has this much room for the messages of one other rank. All steps
// have equal length. If a share needs more than one step, each message therefore fills at least 2/3
// of this room. With shorter messages, most of the time would be latency. With longer messages,
// many ranks would need more memory.
inline constexpr std::uint64_t kStagedMessageBytes = 512_KiB;
inline constexpr std::uint64_t kPieceAlignElements = 64;  // pieces begin at a line of 128 bytes

constexpr std::uint64_t staging_bytes(std::uint32_t rank_count) {
  return std::max(kStagingBytesMin, (rank_count - 1) * 2 * kStagedMessageBytes);
}

struct ReductionSteps {
  // Returns the part of a rank's range that is added in step number `step`.
  ElementRange piece(const ElementRange& of_rank, std::uint64_t step) const {
    return {std::min(of_rank.begin + step * elements, of_rank.end),
            std::min(of_rank.begin + (step + 1) * elements, of_rank.end)};
  }

  std::uint64_t elements = 0;  // elements in each step except the last step
  std::uint64_t count = 0;
  std::uint32_t halves = 1;  // halves of the staging memory: 2 if steps overlap
};

// `share` is the number of elements that each rank adds. `overlaps` says whether steps may overlap.
inline ReductionSteps reduction_steps(std::uint64_t share, std::uint64_t element_bytes,
                                      std::uint32_t rank_count, std::uint64_t staging_bytes,
                                      bool overlaps) {
  if (rank_count == 1) return {.elements = share, .count = 1};
  const auto room = [&](std::uint32_t halves) {
    return staging_bytes / halves / (rank_count - 1) / element_bytes / kPieceAlignElements *
           kPieceAlignElements;
  };
  const std::uint32_t halves = overlaps && share > room(1) ? 2 : 1;
  SLUICE_CHECK(room(halves) != 0, "the staging memory has room for every rank");
  const std::uint64_t least = div_ceil(share, room(halves));
  const std::uint64_t elements = align_up(div_ceil(share, least), kPieceAlignElements);
  return {.elements = elements, .count = div_ceil(share, elements), .halves = halves};
}

}  // namespace sluice
