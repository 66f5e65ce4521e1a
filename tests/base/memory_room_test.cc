#include "base/memory_room.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include <sluice/units.h>

namespace sluice {
namespace {

namespace fs = std::filesystem;

// A folder that looks like /proc and /sys/fs/cgroup: a machine with 1 GiB free, and a process that
// has 8 MiB of its own.
class MemoryRoomTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    root_ = fs::path(testing::TempDir()) /
            ("sluice-room-" + std::to_string(::getpid()) + "-" + test->name());
    write("proc/meminfo", "MemTotal:  4194304 kB\nMemFree:   100 kB\nMemAvailable:   1048576 kB");
    write("proc/self/status", "VmRSS:\t 20000 kB\nRssAnon:\t    8192 kB\nRssFile: 1 kB");
  }
  void TearDown() override { fs::remove_all(root_); }

  void write(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text << '\n';
  }
  MemoryRoom read() const { return read_memory_room(root_ / "proc", root_ / "sys"); }

  fs::path root_;
};

TEST_F(MemoryRoomTest, IsWhatTheMachineHasFreeWithWhatTheProcessHas) {
  EXPECT_EQ(read().size_bytes, 1_GiB + 8_MiB);
  EXPECT_EQ(read().bound, "the machine");
}

TEST_F(MemoryRoomTest, SaysWhatTheProcessHasAndWhoSharesIt) {
  write("proc/sys/kernel/random/boot_id", "0a");
  EXPECT_EQ(read().own_bytes, 8_MiB);
  const std::uint64_t machine = read().id;
  EXPECT_EQ(read().id, machine);
  write("proc/self/cgroup", "0::/job");
  write("sys/job/memory.max", std::to_string(2_GiB));
  EXPECT_EQ(read().id, machine) << "the machine still bounds it";
  write("sys/job/memory.max", std::to_string(200_MiB));
  const std::uint64_t group = read().id;
  EXPECT_NE(group, machine);
  write("proc/self/cgroup", "0::/other");
  write("sys/other/memory.max", std::to_string(200_MiB));
  EXPECT_NE(read().id, group);
  EXPECT_NE(read().id, machine);
  write("proc/sys/kernel/random/boot_id", "0b");
  fs::remove(root_ / "proc/self/cgroup");
  EXPECT_NE(read().id, machine) << "another host";
}

TEST_F(MemoryRoomTest, MissingFilesLimitNothing) {
  fs::remove_all(root_ / "proc");
  EXPECT_GT(read().size_bytes, 1_GiB << 20);
}

TEST_F(MemoryRoomTest, Version2LimitLessWhatOthersUseWithoutPageCache) {
  write("proc/self/cgroup", "0::/user/job");
  write("sys/user/job/memory.max", std::to_string(200_MiB));
  EXPECT_EQ(read().size_bytes, 200_MiB);
  EXPECT_EQ(read().bound, "the cgroup's limit of 200 MiB");
  write("sys/user/job/memory.current", std::to_string(98_MiB));
  EXPECT_EQ(read().size_bytes, 200_MiB) << "all of it may be cache";
  write("sys/user/job/memory.stat", "inactive_file 0");
  EXPECT_EQ(read().size_bytes, 110_MiB) << "8 of 98 MiB are the process's own";
  write("sys/user/job/memory.stat", "anon 41943040\nfile 73400320\ninactive_file " +
                                        std::to_string(30_MiB) + "\nactive_file " +
                                        std::to_string(15_MiB) + "\nslab_reclaimable " +
                                        std::to_string(5_MiB) + "\nshmem 20971520");
  EXPECT_EQ(read().size_bytes, 160_MiB);
}

TEST_F(MemoryRoomTest, TheLeastOfTheAncestorsBinds) {
  write("proc/self/cgroup", "0::/user/job");
  write("sys/user/job/memory.max", "max");
  write("sys/user/memory.max", std::to_string(100_MiB));
  EXPECT_EQ(read().size_bytes, 100_MiB);
  write("sys/memory.max", std::to_string(64_MiB));
  EXPECT_EQ(read().size_bytes, 64_MiB);
  write("sys/user/job/memory.max", std::to_string(32_MiB));
  EXPECT_EQ(read().size_bytes, 32_MiB);
}

TEST_F(MemoryRoomTest, AllocationsAreNotToBeSlowedByTheGroup) {
  write("proc/self/cgroup", "0::/job");
  write("sys/job/memory.max", std::to_string(200_MiB));
  write("sys/job/memory.high", std::to_string(64_MiB));
  EXPECT_EQ(read().size_bytes, 64_MiB);
  EXPECT_EQ(read().bound, "the cgroup's memory.high of 64.0 MiB");
  write("sys/job/memory.high", "max");
  EXPECT_EQ(read().bound, "the cgroup's limit of 200 MiB");
}

TEST_F(MemoryRoomTest, Version1) {
  write("proc/self/cgroup", "4:memory:/docker/1f\n2:cpu,cpuacct:/docker/1f\n0::/");
  write("sys/memory/docker/memory.limit_in_bytes", "9223372036854771712");  // none
  EXPECT_EQ(read().size_bytes, 1_GiB + 8_MiB);
  write("sys/memory/docker/1f/memory.limit_in_bytes", std::to_string(100_MiB));
  write("sys/memory/docker/1f/memory.usage_in_bytes", std::to_string(58_MiB));
  write("sys/memory/docker/1f/memory.stat", "inactive_file 5\ntotal_inactive_file " +
                                                std::to_string(15_MiB) + "\ntotal_active_file " +
                                                std::to_string(5_MiB));
  EXPECT_EQ(read().size_bytes, 70_MiB);
}

TEST_F(MemoryRoomTest, AGroupThatIsFullLeavesWhatTheProcessHas) {
  write("proc/self/cgroup", "0::/job");
  write("sys/job/memory.max", std::to_string(100_MiB));
  write("sys/job/memory.current", std::to_string(100_MiB));
  write("sys/job/memory.stat", "inactive_file 0");
  EXPECT_EQ(read().size_bytes, 8_MiB);
}

TEST(MemoryRoom, OfThisProcessIsSomeAndNoMoreThanTheMachineHas) {
  EXPECT_GT(memory_room().size_bytes, 1_MiB);
  EXPECT_LE(memory_room().size_bytes, static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
                                          static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)));
}

}  // namespace
}  // namespace sluice
