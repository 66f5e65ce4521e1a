#include "base/numa.h"

#include <sched.h>

#include <cstdlib>
#include <latch>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "base/named_thread.h"

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

void bind_to(int processor) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(processor, &set);
  (void)::sched_setaffinity(0, sizeof set, &set);
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

// As GNU's OpenMP leaves a process: the first thread on one processor, its own on the others.
// Returns 0 if the engine's threads run on all of them.
int start_threads_beside_openmp(const char* proc_bind) {
  const std::vector<int> all = allowed();
  std::latch is_bound(2);
  std::latch is_done(1);
  std::jthread worker([&] {
    bind_to(all.back());
    is_bound.arrive_and_wait();
    is_done.wait();
  });
  bind_to(all.front());
  is_bound.arrive_and_wait();
  ::setenv("OMP_PROC_BIND", proc_bind, 1);
  std::vector<int> in_thread;
  start_thread("openmp", [&] { in_thread = allowed(); }).join();
  const AlignedBuffer buffer(8_MiB, "a test");  // its threads may move, but not the caller
  is_done.count_down();
  if (allowed() != std::vector<int>{all.front()}) return 1;
  const bool is_everywhere = in_thread.size() > 1 && in_thread.back() == all.back();
  return is_everywhere == (std::string_view(proc_bind) != "false") ? 0 : 2;
}

TEST(NumaNodesDeathTest, ThreadsDoNotStayWhereOpenMpHasBoundTheirCreator) {
  if (allowed().size() < 2) GTEST_SKIP() << "this needs two processors";
  EXPECT_EXIT(std::_Exit(start_threads_beside_openmp("true")), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(std::_Exit(start_threads_beside_openmp("close")), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(std::_Exit(start_threads_beside_openmp("false")), testing::ExitedWithCode(0), "")
      << "a mask that the program has set itself is kept";
}

}  // namespace
}  // namespace sluice
