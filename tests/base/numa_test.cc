#include "base/numa.h"

#include <dlfcn.h>
#include <sched.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "base/named_thread.h"
#include "base/topology.h"
#include "tests/support/holds_in_child.h"

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

// Two sockets of two nodes each: a GPU of the second socket has two nodes near it, and of a list
// that cuts a node in two, the half counts.
TEST(NumaNodes, ThoseNearAGpuAreAPart) {
  const NumaNodes nodes("package:2 node:2 core:2 pu:1");
  ASSERT_EQ(nodes.count(), 4u);
  EXPECT_FALSE(nodes.is_part());
  EXPECT_EQ(nodes.processors(), "0-7");
  const std::unique_ptr<NumaNodes> second = nodes.near("4-7");
  ASSERT_NE(second, nullptr);
  EXPECT_TRUE(second->is_part());
  EXPECT_EQ(second->count(), 2u);
  EXPECT_EQ(second->processors(), "4-7");
  EXPECT_EQ(shares(*second, 8), (std::map<unsigned, int>{{0, 4}, {1, 4}}));
  const std::unique_ptr<NumaNodes> uneven = nodes.near("1-3,900");
  ASSERT_NE(uneven, nullptr);
  EXPECT_EQ(uneven->processors(), "1-3");
  EXPECT_EQ(shares(*uneven, 6), (std::map<unsigned, int>{{0, 2}, {1, 4}}));
}

TEST(NumaNodes, WithoutProcessorsNearThereIsNoPart) {
  const NumaNodes nodes("package:2 node:1 core:2 pu:1");
  for (const char* list : {"", "900-901", "no list"}) EXPECT_EQ(nodes.near(list), nullptr) << list;
  const std::unique_ptr<NumaNodes> first = nodes.near("0-1");
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->near("2-3"), nullptr) << "a part has no more than its own";
}

// The processors that the calling thread may use.
std::vector<int> allowed() {
  cpu_set_t set;
  CPU_ZERO(&set);
  (void)::sched_getaffinity(0, sizeof set, &set);
  std::vector<int> list;
  for (int i = 0; i < CPU_SETSIZE; ++i)
    if (CPU_ISSET(i, &set)) list.push_back(i);
  return list;
}

// In a process of its own, since the choice is for good. Returns 0 if threads and buffers follow
// it.
int stay_near_the_last_processor() {
  const std::vector<int> before = allowed();
  if (NumaNodes::stay_near("99990-99999") || NumaNodes::of_machine().is_part()) return 1;
  if (!NumaNodes::stay_near(std::to_string(before.back()))) return 2;
  std::vector<int> in_thread;
  start_thread("near", [&] { in_thread = allowed(); }).join();
  if (in_thread != std::vector<int>{before.back()}) return 3;
  if (allowed() != before) return 4;  // the caller's thread stays where it is
  const AlignedBuffer buffer(8_MiB, "a test");
  return buffer.data()[5_MiB] == std::byte{0} && allowed() == before ? 0 : 5;
}

TEST(NumaNodesDeathTest, AProcessThatStaysNearItsGpuStartsThreadsThere) {
  EXPECT_EXIT(std::_Exit(stay_near_the_last_processor()), testing::ExitedWithCode(0), "");
}

// Loads GNU's OpenMP, which binds the first thread. Returns 0 if the engine's threads run on all
// processors of the process if `is_bound`, and where the first one runs otherwise.
int start_threads_beside_openmp(const char* proc_bind, bool is_bound) {
  const std::vector<int> all = allowed();
  ::setenv("OMP_PROC_BIND", proc_bind, 1);
  if (::dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL) == nullptr) return 5;
  const std::vector<int> in_first = allowed();
  if ((in_first.size() == 1) != is_bound) return 1;
  std::vector<int> in_thread;
  start_thread("openmp", [&] { in_thread = allowed(); }).join();
  if (in_thread != all) return 2;
  if (read_topology("/nowhere", "/nowhere").granted_cores != all.size()) return 3;
  const AlignedBuffer buffer(8_MiB, "a test");  // its threads may move, but not the caller
  return allowed() == in_first ? 0 : 4;
}

TEST(NumaNodesDeathTest, ThreadsDoNotStayWhereOpenMpHasBoundTheirCreator) {
  if (allowed().size() < 2) GTEST_SKIP() << "this needs two processors";
  if (!test::holds_in_child([] { return ::dlopen("libgomp.so.1", RTLD_NOW) != nullptr; }))
    GTEST_SKIP() << "this needs libgomp.so.1";
  for (const auto& [value, is_bound] : {std::pair("true", true), {"close", true}, {"false", false}})
    EXPECT_EXIT(std::_Exit(start_threads_beside_openmp(value, is_bound)),
                testing::ExitedWithCode(0), "")
        << value;
}

}  // namespace
}  // namespace sluice
