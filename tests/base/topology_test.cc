#include "base/topology.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace sluice {
namespace {

namespace fs = std::filesystem;

// A folder that looks like /proc/self/cgroup and /sys/fs/cgroup.
class FakeCgroup : public testing::Test {
 protected:
  void SetUp() override {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    root_ = fs::path(testing::TempDir()) /
            ("sluice-cgroup-" + std::to_string(::getpid()) + "-" + test->name());
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  void write(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text << '\n';
  }
  Topology read() const { return read_topology(root_ / "proc", root_ / "sys"); }

  fs::path root_;
};

TEST(Topology, SaysWhatThisProcessMayUse) {
  const Topology& found = topology();
  cpu_set_t mask;
  CPU_ZERO(&mask);
  ASSERT_EQ(::sched_getaffinity(0, sizeof(mask), &mask), 0);
  EXPECT_GE(found.granted_cores, 1u);
  EXPECT_LE(found.granted_cores, static_cast<unsigned>(CPU_COUNT(&mask)));
  EXPECT_GT(found.memory_bytes, std::uint64_t{1} << 20);
  EXPECT_GE(found.numa_nodes, 1u);
  EXPECT_EQ(&topology(), &found);
}

[[noreturn]] void exit_with_cores_of_a_process_on_one_core() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (::sched_getaffinity(0, sizeof(mask), &mask) != 0) ::_exit(101);
  int first = 0;
  while (!CPU_ISSET(first, &mask)) ++first;
  CPU_ZERO(&mask);
  CPU_SET(first, &mask);
  // A sanitizer has threads of its own, and the process may run wherever one of its threads may.
  for (const auto& task : fs::directory_iterator("/proc/self/task")) {
    const int id = std::stoi(task.path().filename());
    if (::sched_setaffinity(id, sizeof(mask), &mask) != 0) ::_exit(102);
  }
  ::_exit(static_cast<int>(read_topology("/nowhere", "/nowhere").granted_cores));
}

// In a child process, so that the mask of the test program stays as it is.
TEST(TopologyDeathTest, KeepsToTheAffinityMask) {
  EXPECT_EXIT(exit_with_cores_of_a_process_on_one_core(), testing::ExitedWithCode(1), "");
}

TEST_F(FakeCgroup, MissingFilesLimitNothing) {
  const Topology found = read();
  EXPECT_GE(found.granted_cores, 1u);
  EXPECT_EQ(found.memory_bytes, static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
                                    static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)));
}

TEST_F(FakeCgroup, Version2QuotaAndMemory) {
  write("proc", "0::/user/job");
  write("sys/user/job/cpu.max", "50000 100000");
  write("sys/user/job/memory.max", "4194304");
  EXPECT_EQ(read().granted_cores, 1u);  // half a core is one thread
  write("sys/user/job/cpu.max", "199000 100000");
  EXPECT_EQ(read().granted_cores, 1u);  // and so are nearly two
  EXPECT_EQ(read().quota_cores, 1u);
  EXPECT_EQ(read().memory_bytes, 4194304u);
}

TEST_F(FakeCgroup, LimitOfAnAncestorBinds) {
  write("proc", "0::/user/job");
  write("sys/user/job/memory.max", "8388608");
  write("sys/user/memory.max", "2097152");
  write("sys/memory.max", "max");
  EXPECT_EQ(read().memory_bytes, 2097152u);
  write("sys/user/job/memory.max", "1048576");
  EXPECT_EQ(read().memory_bytes, 1048576u);  // and the group's own, where that is less
}

TEST_F(FakeCgroup, MemoryThatTheKernelSlowsIsNotCounted) {
  write("proc", "0::/job");
  write("sys/job/memory.max", "8388608");
  write("sys/job/memory.high", "2097152");
  EXPECT_EQ(read().memory_bytes, 2097152u);
}

TEST_F(FakeCgroup, MaxAndLargeQuotasLimitNothing) {
  const unsigned unlimited = read().granted_cores;
  EXPECT_EQ(read().quota_cores, UINT_MAX);
  write("proc", "0::/job");
  write("sys/job/cpu.max", "max 100000");
  write("sys/job/memory.max", "max");
  EXPECT_EQ(read().granted_cores, unlimited);
  write("sys/job/cpu.max", "409600000 100000");
  EXPECT_EQ(read().granted_cores, unlimited);
  EXPECT_EQ(read().memory_bytes, topology().memory_bytes);
}

TEST_F(FakeCgroup, Version1QuotaAndMemory) {
  write("proc", "4:memory:/docker/1f\n3:cpuset:/\n2:cpu,cpuacct:/docker/1f\n0::/");
  write("sys/cpu/docker/1f/cpu.cfs_quota_us", "100000");
  write("sys/cpu/docker/1f/cpu.cfs_period_us", "100000");
  write("sys/memory/docker/1f/memory.limit_in_bytes", "1048576");
  EXPECT_EQ(read().granted_cores, 1u);
  EXPECT_EQ(read().memory_bytes, 1048576u);
}

TEST_F(FakeCgroup, Version1QuotaOfMinusOneLimitsNothing) {
  const unsigned unlimited = read().granted_cores;
  write("proc", "2:cpu:/");
  write("sys/cpu/cpu.cfs_quota_us", "-1");
  write("sys/cpu/cpu.cfs_period_us", "100000");
  EXPECT_EQ(read().granted_cores, unlimited);
}

// Inside a container the path is the host's; the mount itself is the container's group.
TEST_F(FakeCgroup, PathThatDoesNotExistHereEndsAtTheMount) {
  write("proc", "0::/host/slice/container");
  write("sys/memory.max", "16777216");
  EXPECT_EQ(read().memory_bytes, 16777216u);
}

}  // namespace
}  // namespace sluice
