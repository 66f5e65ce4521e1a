// The rounds of an all-reduce of integers, played through for worlds of up to thousands of ranks.
#include "gpu/ranks/integer_reduction.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <deque>
#include <map>
#include <utility>

namespace sluice {
namespace {

// A sum and a minimum.
using Words = std::array<std::uint64_t, 2>;

struct Played {
  std::vector<Words> results;    // by rank
  std::size_t messages_max = 0;  // that a rank sends
};

// Every rank goes as far as what has come to it allows, until all have ended.
Played play(std::uint32_t rank_count, std::uint32_t direct_ranks_max) {
  struct Rank {
    std::vector<IntegerRound> rounds;
    std::size_t round = 0;
    bool has_sent = false;
  };
  Played played;
  std::vector<Rank> ranks(rank_count);
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::deque<Words>> sent;  // from, to
  for (std::uint32_t i = 0; i < rank_count; ++i) {
    ranks[i].rounds = integer_rounds(i, rank_count, direct_ranks_max);
    played.results.push_back({i + 1, rank_count - i});
  }
  const AllReduceIntegers operation{.sum_count = 1, .minimum_count = 1, .subject = ""};
  for (bool has_moved = true; has_moved;) {
    has_moved = false;
    for (std::uint32_t i = 0; i < rank_count; ++i) {
      Rank& rank = ranks[i];
      if (rank.round == rank.rounds.size()) continue;
      const IntegerRound& round = rank.rounds[rank.round];
      if (!std::exchange(rank.has_sent, true))
        for (const std::uint32_t target : round.targets)
          sent[{i, target}].push_back(played.results[i]);
      bool has_all = true;
      for (const std::uint32_t source : round.sources)
        has_all = has_all && !sent[{source, i}].empty();
      if (!has_all) continue;
      for (const std::uint32_t source : round.sources) {
        const Words came = sent[{source, i}].front();
        sent[{source, i}].pop_front();
        if (round.replaces) {
          played.results[i] = came;
        } else {
          combine_integers(operation, 0, 2, reinterpret_cast<const std::byte*>(came.data()),
                           reinterpret_cast<std::byte*>(played.results[i].data()));
        }
      }
      ++rank.round;
      rank.has_sent = false;
      has_moved = true;
    }
  }
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.round, rank.rounds.size()) << "a rank of " << rank_count << " waits for ever";
    std::size_t messages = 0;
    for (const IntegerRound& round : rank.rounds) messages += round.targets.size();
    played.messages_max = std::max(played.messages_max, messages);
  }
  for (const auto& [pair, left] : sent)
    EXPECT_TRUE(left.empty()) << pair.first << " to " << pair.second << " of " << rank_count;
  return played;
}

void expect_result(std::uint32_t rank_count, std::uint32_t direct_ranks_max) {
  const Played played = play(rank_count, direct_ranks_max);
  const Words expected{std::uint64_t{rank_count} * (rank_count + 1) / 2, 1};
  for (std::uint32_t rank = 0; rank < rank_count; ++rank)
    ASSERT_EQ(played.results[rank], expected) << "rank " << rank << " of " << rank_count;
  const bool is_direct = rank_count <= direct_ranks_max;
  const std::size_t messages_max =
      is_direct ? rank_count - 1 : static_cast<std::size_t>(std::bit_width(rank_count));
  EXPECT_LE(played.messages_max, messages_max) << rank_count;
}

TEST(IntegerRounds, EveryRankHasAllOfThem) {
  for (const std::uint32_t direct_ranks_max : {1u, 4u, 16u})
    for (std::uint32_t ranks = 1; ranks <= 70; ++ranks) expect_result(ranks, direct_ranks_max);
  for (const std::uint32_t ranks : {304u, 1024u, 4095u, 4096u, 4097u}) expect_result(ranks, 16);
}

}  // namespace
}  // namespace sluice
