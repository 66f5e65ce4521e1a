#include "base/numa.h"

#include <map>

#include <gtest/gtest.h>

#include <sluice/error.h>

namespace sluice {
namespace {

std::map<unsigned, int> shares(const NumaNodes& nodes, std::uint64_t total) {
  std::map<unsigned, int> count;
  unsigned last = 0;
  for (std::uint64_t i = 0; i < total; ++i) {
    const unsigned node = nodes.node_of(i, total);
    EXPECT_GE(node, last) << "a node's shares follow each other";
    last = node;
    ++count[node];
  }
  return count;
}

TEST(NumaNodes, ThisMachineHasOneAtLeast) {
  const NumaNodes& nodes = NumaNodes::of_machine();
  EXPECT_GE(nodes.count(), 1u);
  EXPECT_LT(nodes.node_of(9, 10), nodes.count());
  EXPECT_EQ(&NumaNodes::of_machine(), &nodes);
}

TEST(NumaNodes, SharesAreConsecutiveAndEven) {
  const NumaNodes nodes("node:4 core:2 pu:1");
  ASSERT_EQ(nodes.count(), 4u);
  EXPECT_EQ(shares(nodes, 8), (std::map<unsigned, int>{{0, 2}, {1, 2}, {2, 2}, {3, 2}}));
  EXPECT_EQ(shares(nodes, 2), (std::map<unsigned, int>{{1, 1}, {3, 1}}));
  EXPECT_EQ(shares(nodes, 400), (std::map<unsigned, int>{{0, 100}, {1, 100}, {2, 100}, {3, 100}}));
}

TEST(NumaNodes, ANodeGetsItsPartOfTheUnits) {
  const NumaNodes nodes("package:2 node:1 core:1 pu:1(indexes=0,1)");
  EXPECT_EQ(nodes.count(), 2u);
  const NumaNodes one("node:1 core:6 pu:2");
  EXPECT_EQ(one.count(), 1u);
  EXPECT_EQ(shares(one, 5), (std::map<unsigned, int>{{0, 5}}));
}

TEST(NumaNodes, ADescriptionThatMeansNothingIsRefused) {
  EXPECT_THROW(NumaNodes("two nodes, please"), Error);
}

}  // namespace
}  // namespace sluice
