// RankWorld without a launcher, in environments that contradict the options, and over the stand-in
// for the library that is linked to MPI (tests/gpu/ranks/fake_mpi_plugin.cc). Ranks that really
// meet: examples/ranks below mpirun, and the command's cases of ranks.
#include <sluice/rank_world.h>

#include <gtest/gtest.h>

#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/unique_fd.h"
#include "engine/ranks/host_cores.h"
#include "tests/support/expect_error.h"

namespace sluice::test {
namespace {

class RankWorldTest : public testing::Test {
 protected:
  // The environment that a launcher would give, until the test ends.
  void launch(std::vector<std::pair<std::string, std::string>> variables) {
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
    variables_ = std::move(variables);
  }
  void launch_by_mpirun() {
    launch({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "4"}});
  }
  // Rank 0 of 4, two on each host. The call `blocks` of the stand-in never returns.
  void launch_over_the_fake(const std::string& blocks, const char* local_ranks = "2") {
    launch({{"OMPI_COMM_WORLD_RANK", "0"},
            {"OMPI_COMM_WORLD_SIZE", "4"},
            {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
            {"OMPI_COMM_WORLD_LOCAL_SIZE", local_ranks},
            {"FAKE_MPI_RANKS", "4"},
            {"FAKE_MPI_BLOCKS", blocks}});
  }
  void launch_by_torchrun(int port, const char* rank) {
    launch({{"RANK", rank},
            {"WORLD_SIZE", "3"},
            {"LOCAL_RANK", rank},
            {"LOCAL_WORLD_SIZE", "3"},
            {"MASTER_ADDR", "127.0.0.1"},
            {"MASTER_PORT", std::to_string(port)}});
  }
  static RankWorldOptions over_the_fake() {
    return {.sharding = {.timeout_s = 0.2}, .mpi_library = FAKE_MPI};
  }
  void TearDown() override {
    for (const auto& [name, value] : variables_) ::unsetenv(name.c_str());
  }

  static void refused(ErrorCode code, const RankWorldOptions& options,
                      const std::vector<std::string>& words) {
    const std::string message = expect_error(code, [&] { const RankWorld world(options); });
    for (const std::string& word : words)
      EXPECT_NE(message.find(word), std::string::npos) << word << " is not in: " << message;
  }

  std::vector<std::pair<std::string, std::string>> variables_;
};

TEST_F(RankWorldTest, WithoutALauncherThereIsOneRank) {
  RankWorld world;
  EXPECT_FALSE(world.are_several());
  EXPECT_EQ(world.rank(), 0u);
  EXPECT_EQ(world.count(), 1u);
  EXPECT_EQ(world.host_rank(), 0u);
  EXPECT_EQ(world.host_ranks(), 1u);
  EXPECT_EQ(world.launcher(), "");
  EXPECT_EQ(world.gpu().ordinal, 0);
  Config config;
  config.sharding.group_is_node = true;
  EXPECT_EQ(world.shared(config).threads, 0u);
  EXPECT_TRUE(world.shared(config).sharding.group_is_node);  // one rank ignores the section
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  EXPECT_EQ(world.join(*device), nullptr);
  world.leave();
  world.abort();
}

TEST_F(RankWorldTest, OneRankBelowALauncherNeedsNoMpi) {
  launch({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}});
  const RankWorld world({.mpi_library = "/none/libsluice_mpi.so"});
  EXPECT_EQ(world.launcher(), "Open MPI");
  EXPECT_EQ(world.count(), 1u);
}

TEST_F(RankWorldTest, AnEnvironmentThatContradictsItselfIsRefused) {
  launch({{"OMPI_COMM_WORLD_RANK", "4"}, {"OMPI_COMM_WORLD_SIZE", "4"}});
  refused(ErrorCode::kConfig, {}, {"4"});
}

TEST_F(RankWorldTest, HostsBelowTorchrunAreRefused) {
  launch_by_torchrun(29500, "1");
  refused(ErrorCode::kUnsupported, {}, {"torchrun", "rank 1 of 3", "mpirun -n 3"});
}

// GPU ranks meet behind torchrun's port, where the next job's torchrun may be.
TEST_F(RankWorldTest, APortWhereTheRanksOfTorchrunCannotMeetIsNamed) {
  launch_by_torchrun(65535, "1");
  refused(ErrorCode::kConfig, {.device = RankDevice::kGpu}, {"65535", "--master-port"});
  const UniqueFd other(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  ASSERT_EQ(::bind(other.get(), any, size), 0);
  ASSERT_EQ(::listen(other.get(), 1), 0);
  ASSERT_EQ(::getsockname(other.get(), any, &size), 0);
  const int port = ntohs(address.sin_port);
  launch_by_torchrun(port - 1, "0");
  refused(ErrorCode::kRanks, {.device = RankDevice::kGpu},
          {"127.0.0.1:" + std::to_string(port), "MASTER_PORT", "--master-port"});
}

TEST_F(RankWorldTest, HostsThatAddByNcclAreRefused) {
  launch_by_mpirun();
  refused(ErrorCode::kConfig, {.sharding = {.reduction = RankReduction::kNccl}},
          {"sharding.reduction", "\"nccl\"", "\"exact\""});
}

TEST_F(RankWorldTest, AWaitThatCannotBeIsRefused) {
  launch_over_the_fake("");
  refused(ErrorCode::kConfig, {.sharding = {.timeout_s = 0}, .mpi_library = FAKE_MPI},
          {"sharding.timeout_s", "0 is not in 0.1..86400"});
}

TEST_F(RankWorldTest, AMissingLibraryIsNamed) {
  launch_by_mpirun();
  refused(ErrorCode::kUnsupported, {.mpi_library = "/none/libsluice_mpi.so"},
          {"/none/libsluice_mpi.so"});
}

TEST_F(RankWorldTest, ARankTakesItsPartOfTheHost) {
  launch_over_the_fake("");
  const RankWorld world(over_the_fake());
  EXPECT_EQ(world.count(), 4u);
  EXPECT_EQ(world.host_ranks(), 2u);
  Config config;
  config.sharding.group_is_node = true;
  EXPECT_EQ(world.shared(config).sharding.group_ranks, 2u);
  EXPECT_FALSE(world.shared(config).sharding.group_is_node);
  EXPECT_EQ(world.shared(config).threads, own_share_of_cores("OMPI_COMM_WORLD_RANK", 2));
  config.threads = 7;
  EXPECT_EQ(world.shared(config).threads, 7u);
  EXPECT_EQ(world.shared(config).sharding.node_ranks, 0u);
  config.sharding.reduction = RankReduction::kNodes;
  EXPECT_EQ(world.shared(config).sharding.node_ranks, 2u);
  config.sharding.node_ranks = 4;
  EXPECT_EQ(world.shared(config).sharding.node_ranks, 4u);
}

TEST_F(RankWorldTest, HostsOfDifferentSizesAreNoGroups) {
  launch_over_the_fake("", "3");
  const RankWorld world(over_the_fake());
  Config config;
  config.sharding.group_is_node = true;
  const std::string message = expect_error(ErrorCode::kConfig, [&] { (void)world.shared(config); });
  EXPECT_NE(message.find("rank 0 of 4 is number 0 of 3"), std::string::npos) << message;
  config.sharding = {.reduction = RankReduction::kNodes};
  const std::string of_nodes =
      expect_error(ErrorCode::kConfig, [&] { (void)world.shared(config); });
  EXPECT_NE(of_nodes.find("sharding.reduction is \"nodes\", but rank 0 of 4 is number 0 of 3"),
            std::string::npos)
      << of_nodes;
}

TEST_F(RankWorldTest, ALauncherThatDoesNotTellOfHostsMakesNoGroups) {
  launch({{"PMI_RANK", "0"}, {"PMI_SIZE", "4"}, {"FAKE_MPI_RANKS", "4"}, {"FAKE_MPI_BLOCKS", ""}});
  const RankWorld world(over_the_fake());
  Config config;
  config.sharding.group_is_node = true;
  const std::string message = expect_error(ErrorCode::kConfig, [&] { (void)world.shared(config); });
  EXPECT_NE(message.find("MPICH does not tell"), std::string::npos) << message;
}

TEST_F(RankWorldTest, AnotherMpiThanTheLaunchersIsRefused) {
  launch({{"OMPI_COMM_WORLD_RANK", "0"},
          {"OMPI_COMM_WORLD_SIZE", "4"},
          {"FAKE_MPI_RANKS", "1"},
          {"FAKE_MPI_BLOCKS", ""}});
  refused(ErrorCode::kUnsupported, over_the_fake(),
          {"Open MPI says that this is rank 0 of 4", "rank 0 of 1", "srun --mpi=pmix"});
}

TEST_F(RankWorldTest, RanksThatDoNotComeAreAnErrorWhereverTheyAreAwaited) {
  launch_over_the_fake("init");
  refused(ErrorCode::kRanks, over_the_fake(), {"MPI_Init", "0.2 s"});
  launch_over_the_fake("finalize");
  {
    RankWorld world(over_the_fake());
    const std::string message = expect_error(ErrorCode::kRanks, [&] { world.leave(); });
    EXPECT_NE(message.find("MPI_Finalize"), std::string::npos) << message;
  }
  { const RankWorld silent(over_the_fake()); }
  launch_over_the_fake("abort");
  RankWorld world(over_the_fake());
  world.abort();  // MPI does not end it in time, so that the caller does
}

// The stand-in's other ranks answer with zeros.
TEST_F(RankWorldTest, TheCollectivesAreOverAllRanks) {
  launch_over_the_fake("");
  RankWorld world(over_the_fake());
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  const auto ranks = world.join(*device);
  ASSERT_NE(ranks, nullptr);
  EXPECT_EQ(ranks->rank_count(), 4u);
  EXPECT_EQ(ranks->memory_device(), device.get());
  const Stream stream(*device, "test");
  const DeviceBuffer data(*device, 4096, "a test");
  auto* const values = reinterpret_cast<float*>(data.data());
  for (int i = 0; i < 16; ++i) values[i] = static_cast<float>(i);
  ranks->all_reduce({.data = data.data(), .element_count = 16, .subject = "a test"}, stream.id());
  device->synchronize(stream.id());
  for (int i = 0; i < 4; ++i) EXPECT_EQ(values[i], static_cast<float>(i)) << i;
}

TEST_F(RankWorldTest, RanksJoinOnceWithTheDeviceOfTheOptions) {
  RankWorld world;
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  (void)world.join(*device);
  const std::string twice =
      expect_error(ErrorCode::kInvalidArgument, [&] { (void)world.join(*device); });
  EXPECT_NE(twice.find("rank 0 of 1 has joined already"), std::string::npos) << twice;
  RankWorld gpus({.device = RankDevice::kGpu});
  const std::string other =
      expect_error(ErrorCode::kInvalidArgument, [&] { (void)gpus.join(*device); });
  EXPECT_NE(other.find("gives a host device, but RankWorldOptions::device says GPU"),
            std::string::npos)
      << other;
}

}  // namespace
}  // namespace sluice::test
