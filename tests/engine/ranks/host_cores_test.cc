// The cores that a rank takes: what its launcher may use is found in the system's files, made here
// as launchers leave them, and of a real parent.
#include "engine/ranks/host_cores.h"

#include <gtest/gtest.h>

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

class HostCores : public testing::Test {
 protected:
  void write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = directory_.file(path);
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary) << text;
  }
  void add_process(const std::string& id, const std::string& parent, const std::string& cores,
                   std::string_view environment = "") {
    write("proc/" + id + "/status", "Name:\tprogram\nPPid:\t" + parent +
                                        "\nCpus_allowed:\tff\nCpus_allowed_list:\t" + cores + "\n");
    if (!environment.empty()) write("proc/" + id + "/environ", std::string(environment));
  }
  unsigned found() const {
    return cores_of_launcher(
        "SLURM_PROCID", {.proc = directory_.file("proc"), .cgroups = directory_.file("groups")});
  }

  TempDirectory directory_;
};

constexpr std::string_view kOfARank("HOME=/\0SLURM_PROCID=3\0", 22);
constexpr std::string_view kOfTheJob("HOME=/\0SLURM_PROCIDS=3\0", 23);

// Four tasks of four cores each on a host of 16, bound by srun or not, and wrapped.
TEST_F(HostCores, TheLauncherIsBehindTheWrappersOfARank) {
  add_process("self", "40", "4-7");
  add_process("40", "30", "4-7", kOfARank);
  add_process("30", "20", "4-7", kOfARank);
  add_process("20", "1", "0-15", kOfTheJob);
  add_process("1", "0", "0-127");
  EXPECT_EQ(found(), 16u);
}

// Slurm's own process, whose variables only root reads, may use all cores of the host.
TEST_F(HostCores, TheLauncherHasNoMoreThanTheGroupOfTheRanks) {
  add_process("self", "20", "4-7");
  add_process("20", "1", "0-127");
  EXPECT_EQ(found(), 128u);
  write("proc/self/cgroup", "0::/job/step\n");
  write("groups/job/cpuset.cpus.effective", "0-3,8-11,16-23\n");
  EXPECT_EQ(found(), 16u);
  write("proc/self/cgroup", "5:cpuset:/none\n");
  write("groups/cpuset/cpuset.cpus", "0\n");
  EXPECT_EQ(found(), 1u);
}

TEST_F(HostCores, AncestorsThatCannotBeSeenEndTheSearch) {
  EXPECT_EQ(found(), 0u);
  add_process("self", "0", "4-7");
  EXPECT_EQ(found(), 0u);
  add_process("self", "20", "4-7");
  EXPECT_EQ(found(), 0u);
  add_process("20", "1", "0-7", kOfARank);  // the first process of a container has the variable
  EXPECT_EQ(found(), 8u);
}

TEST(ShareOfCores, IsAnEqualPartOfTheLaunchersButNoMoreThanTheOwnOnes) {
  constexpr unsigned kNone = UINT_MAX;
  EXPECT_EQ(share_of_cores(16, 16, kNone, 4), 4u);   // not bound
  EXPECT_EQ(share_of_cores(64, 16, kNone, 4), 16u);  // each to cores of its own
  EXPECT_EQ(share_of_cores(64, 32, kNone, 8), 8u);   // four to each half of the host
  EXPECT_EQ(share_of_cores(64, 4, kNone, 8), 4u);
  EXPECT_EQ(share_of_cores(0, 16, kNone, 4), 4u);  // it cannot be seen
  EXPECT_EQ(share_of_cores(2, 16, kNone, 4), 4u);  // this rank has widened its own mask
  EXPECT_EQ(share_of_cores(8, 8, kNone, 16), 1u);
  EXPECT_EQ(share_of_cores(8, 8, kNone, 0), 8u);
}

// Also where each rank is bound to cores of its own, all of which have more.
TEST(ShareOfCores, AllShareAQuota) {
  EXPECT_EQ(share_of_cores(64, 64, 16, 4), 4u);
  EXPECT_EQ(share_of_cores(64, 16, 20, 4), 5u);
  EXPECT_EQ(share_of_cores(64, 32, 32, 4), 8u);
  EXPECT_EQ(share_of_cores(64, 16, 64, 4), 16u);
  EXPECT_EQ(share_of_cores(64, 16, 2, 4), 1u);
  EXPECT_EQ(share_of_cores(64, 16, 8, 0), 8u);
}

// The kernel's own files: this process launches one that binds itself.
TEST(ShareOfCores, AChildIsBoundAndItsLauncherIsNot) {
  cpu_set_t own;
  CPU_ZERO(&own);
  ASSERT_EQ(::sched_getaffinity(0, sizeof own, &own), 0);
  const auto cores = static_cast<unsigned>(CPU_COUNT(&own));
  const pid_t child = ::fork();
  if (child == 0) {
    int first = 0;
    while (!CPU_ISSET(first, &own)) ++first;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    if (::sched_setaffinity(0, sizeof one, &one) != 0) ::_exit(2);
    ::_exit(cores_of_launcher("SLUICE_NO_RANK") == cores ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace sluice::test
