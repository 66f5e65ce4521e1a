// An all-reduce of integers, whatever connects the ranks: how the words of two of them become one,
// and, by messages, who sends them to whom. Sums modulo 2^64 and minima depend on no order, so few
// ranks send to each other at once, and many go through rounds that double how many ranks a word
// speaks for: log2 N messages instead of N - 1.
//
// Thread rule: pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <sluice/collectives.h>

namespace sluice {

// Adds the others' `source`, or takes the lesser, into `target`: `count` words of the operation's,
// from word `first` on; both sides begin there.
void combine_integers(const AllReduceIntegers& operation, std::uint64_t first, std::uint64_t count,
                      const std::byte* source, std::byte* target);

// A rank sends its words to `targets`, and combines them with those of `sources` when all have
// gone and come. A round begins when the one before has ended.
struct IntegerRound {
  std::vector<std::uint32_t> targets = {};
  std::vector<std::uint32_t> sources = {};
  bool replaces = false;  // what comes takes the place of the own words: the result
};

// The rounds of `rank`. Up to `direct_ranks_max` ranks there is one. Else the ranks above the
// largest power of two bring their words to one below and get the result from there; the others
// exchange with the rank whose number differs in bit 0, then 1, and so on. Six ranks:
//   4 to 0, 5 to 1;  0 with 1, 2 with 3;  0 with 2, 1 with 3;  0 to 4, 1 to 5.
std::vector<IntegerRound> integer_rounds(std::uint32_t rank, std::uint32_t rank_count,
                                         std::uint32_t direct_ranks_max);

}  // namespace sluice
