// The orders of micro-batches that give other bits than each other.
#include "engine/planner/order_choice.h"

#include <gtest/gtest.h>

namespace sluice {
namespace {

TEST(OrderChoice, ChangesBitsWithTiedWeightsAndWhereEachRankAddsFirst) {
  struct Case {
    std::uint32_t stage, ranks, micro_batches;
    bool is_tied, changes_bits;
  };
  constexpr Case kCases[] = {
      {0, 1, 4, false, false}, {0, 1, 4, true, true},   {0, 1, 1, true, false},
      {0, 2, 4, false, true},  {1, 2, 4, false, true},  {2, 2, 4, false, false},
      {3, 2, 4, false, false}, {0, 2, 1, false, false}, {3, 2, 4, true, true},
  };
  for (const Case& one : kCases) {
    Config config;
    config.sharding.stage = one.stage;
    EXPECT_EQ(order_changes_bits(config, one.micro_batches, one.is_tied, one.ranks),
              one.changes_bits)
        << one.stage << " " << one.ranks << " " << one.micro_batches << " " << one.is_tied;
  }
}

}  // namespace
}  // namespace sluice
