// An all-reduce of integers over any connection. This file defines how the words of two ranks are
// combined, and which ranks exchange messages. The order of the ranks does not change the results,
// because the results are minima and sums modulo 2^64. If there are few ranks, the ranks exchange
// all words in one round. If there are many ranks, the ranks exchange words in several rounds.
// After each round, a word combines the values of twice as many ranks as before. With several
// rounds, each of N ranks sends log2 N messages instead of N - 1.
//
// Thread rule: any thread may call the functions, because the functions are pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <sluice/collectives.h>

namespace sluice {

// The function combines `count` words of another rank's `source` with the words of `target`. Each
// result is the sum of the two values, or the smaller value. Both arrays begin with word `first` of
// the operation.
void combine_integers(const AllReduceIntegers& operation, std::uint64_t first, std::uint64_t count,
                      const std::byte* source, std::byte* target);

// A rank sends its words to `targets` and receives the words of `sources`. After all messages of
// the round, the rank combines the received words with its own words. A round begins when the
// previous round has ended.
struct IntegerRound {
  std::vector<std::uint32_t> targets = {};
  std::vector<std::uint32_t> sources = {};
  bool replaces = false;  // the received words are the result and replace the rank's words
};

// Returns the rounds of `rank`. If there are at most `direct_ranks_max` ranks, one round is enough.
// If there are more ranks, P is the largest power of two that is not above `rank_count`. If r is P
// or more, rank r sends its words to rank r - P, and later receives the result from rank r - P.
// Each rank with a number below P exchanges words with one other rank per round. In the first of
// these rounds, the numbers of the two ranks differ in bit 0. In the next round, the numbers differ
// in bit 1, and so on. Example with six ranks:
//   4 to 0, 5 to 1;  0 with 1, 2 with 3;  0 with 2, 1 with 3;  0 to 4, 1 to 5.
std::vector<IntegerRound> integer_rounds(std::uint32_t rank, std::uint32_t rank_count,
                                         std::uint32_t direct_ranks_max);

}  // namespace sluice
