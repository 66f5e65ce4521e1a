// An all-reduce of integers over any connection: how the words of two ranks become one, and, with
// messages, which ranks exchange. Sums modulo 2^64 and minima depend on no order. So few ranks
// exchange all at once, while many go through rounds, each of which doubles the number of ranks
// that a word stands for: log2 N messages instead of N - 1.
//
// Thread rule: pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <sluice/collectives.h>

namespace sluice {

// Adds the other rank's `source` to `target`, or takes the smaller value: `count` words of the
// operation, from word `first` on, where both arrays begin.
void combine_integers(const AllReduceIntegers& operation, std::uint64_t first, std::uint64_t count,
                      const std::byte* source, std::byte* target);

// A rank sends its words to `targets`, and combines them with those of `sources` after all of these
// messages. A round begins when the one before has ended.
struct IntegerRound {
  std::vector<std::uint32_t> targets = {};
  std::vector<std::uint32_t> sources = {};
  bool replaces = false;  // the received words are the result and replace its own
};

// The rounds of `rank`. Up to `direct_ranks_max` ranks need one round. Otherwise each rank above
// the largest power of two sends its words to a rank below and gets the result from there; the
// others exchange with the rank whose number differs in bit 0, then in bit 1, and so on. Six ranks:
//   4 to 0, 5 to 1;  0 with 1, 2 with 3;  0 with 2, 1 with 3;  0 to 4, 1 to 5.
std::vector<IntegerRound> integer_rounds(std::uint32_t rank, std::uint32_t rank_count,
                                         std::uint32_t direct_ranks_max);

}  // namespace sluice
