// The pieces of an array that the threads of a loop take. The functions are pure.
#pragma once

#include <algorithm>
#include <cstdint>

#include <sluice/units.h>
#include "cpu_optim/gradient_ops.h"

namespace sluice {

// A large piece costs less to hand out: 32 Ki elements are about 900 KiB of state, against a
// microsecond.
inline constexpr std::uint64_t kChunkElementsMost = 32 * 1024;
inline constexpr std::uint64_t kChunkElementsLeast = 4 * 1024;
// All threads wait for the last piece of a loop. With so many pieces for each thread, they wait for
// at most an eighth of the loop's time.
inline constexpr std::uint64_t kChunksPerThread = 8;
static_assert(kChunkElementsLeast % kNormLeafElements == 0);

// Returns the number of elements in each piece but the last, if `threads` threads take the pieces
// of an array of `element_count` elements. The result is a multiple of the norm's leaf and of every
// vector, so that cuts change neither tree nor alignment.
constexpr std::uint64_t chunk_elements(std::uint64_t element_count, unsigned threads) {
  const std::uint64_t wanted =
      align_up(div_ceil(element_count, threads * kChunksPerThread), kNormLeafElements);
  return std::clamp(wanted, kChunkElementsLeast, kChunkElementsMost);
}

}  // namespace sluice
