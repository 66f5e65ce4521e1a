// The contract of collectives over NCCL: run by mpirun, every process is one rank and runs all
// cases in step. One GPU is enough: each rank says that it is a host of its own, without which NCCL
// refuses two ranks on a GPU. A test of results, never a measurement. Exits with 77, aloud, where
// there is no GPU or no NCCL.
#include "gpu/ranks/nccl_collectives.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "cpu_optim/rank_sum.h"
#include "gpu/ranks/mpi_collectives.h"
#include "tests/contract/collectives_contract.h"

namespace sluice {
namespace {

void set(const char* name, const std::string& value) {
  (void)::setenv(name, value.c_str(), /*overwrite=*/1);
}

struct Rank {
  MpiWorld world{{.timeout_s = 60, .sum = sum_in_order}};
  std::unique_ptr<HostDevice> host = make_host_device({.memory_bytes = 1_MiB});
  std::unique_ptr<Collectives> hosts = world.join(*host);
  std::unique_ptr<CudaDevice> gpu;
  std::unique_ptr<Collectives> gpus;

  Rank() {
    const Stream stream(*host, "meeting");
    const DeviceBuffer id(*host, sizeof(NcclId), "NCCL's id");
    NcclId bytes{};
    if (world.rank() == 0) bytes = make_nccl_id();
    std::memcpy(id.data(), bytes.data(), bytes.size());
    hosts->broadcast({.data = id.data(), .size_bytes = bytes.size(), .subject = "id"}, stream.id());
    host->synchronize(stream.id());
    std::memcpy(bytes.data(), id.data(), bytes.size());
    gpu = make_cuda_device({.memory_bytes = 512_MiB, .memory_source = nccl_memory_source()});
    gpus = make_nccl_collectives(*gpu, {.timeout_s = 60}, bytes, world.rank(), world.rank_count());
  }
};

Rank& this_rank() {
  static Rank rank;
  return rank;
}

INSTANTIATE_TEST_SUITE_P(
    Nccl, CollectivesContract,
    testing::Values(CollectivesFactory{
        "nccl", [](const RankBody& body) { body(*this_rank().gpus, *this_rank().gpu); }}),
    collectives_factory_name);

// The same values out of registered memory, which copy engines may gather into.
TEST(NcclMemory, RegisteredMemoryGivesTheSameBytes) {
  Collectives& ranks = *this_rank().gpus;
  Device& device = *this_rank().gpu;
  constexpr std::uint64_t kShard = 4_MiB;
  const Stream stream(device, "test");
  const DeviceBuffer memory(device, kShard * ranks.rank_count(), "registered");
  HostArray host(device, kShard * ranks.rank_count());
  std::byte* const own = memory.data() + ranks.rank() * kShard;
  for (std::uint64_t i = 0; i < kShard; ++i) host.data()[i] = rank_byte(ranks.rank(), i);
  ranks.use_memory({memory.data(), memory.size_bytes()});
  device.copy(own, host.data(), kShard, stream.id());
  ranks.all_gather(
      {.target = memory.data(), .source = own, .shard_bytes = kShard, .subject = "registered"},
      stream.id());
  device.copy(host.data(), memory.data(), memory.size_bytes(), stream.id());
  device.synchronize(stream.id());
  ranks.forget_memory();
  for (std::uint64_t i = 0; i < memory.size_bytes(); ++i)
    ASSERT_EQ(host.data()[i], rank_byte(static_cast<std::uint32_t>(i / kShard), i % kShard)) << i;
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const char* const rank = std::getenv("OMPI_COMM_WORLD_RANK");
  if (std::getenv("NCCL_MULTI_RANK_GPU_ENABLE") == nullptr)
    sluice::set("NCCL_HOSTID", std::string("rank ") + (rank == nullptr ? "0" : rank));
  for (const auto& [name, value] : {std::pair{"NCCL_SOCKET_IFNAME", "lo"},
                                    {"NCCL_IB_DISABLE", "1"},
                                    {"NCCL_MNNVL_ENABLE", "0"},
                                    {"NCCL_RAS_ENABLE", "0"},
                                    {"NCCL_MAX_NCHANNELS", "2"}})
    sluice::set(name, value);
  sluice::prepare_nccl_environment();
  std::string why = sluice::why_no_cuda_device();
  if (why.empty()) why = sluice::why_no_nccl();
  if (!why.empty()) {
    std::printf("skipped: %s\n", why.c_str());
    return 77;
  }
  return RUN_ALL_TESTS();
}
