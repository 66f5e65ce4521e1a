// The contract of collectives over MPI: run by mpirun, every process is one rank and runs all cases
// in step. The first argument is the path between ranks of a host: best, messages, reading,
// or rounds: messages, as many ranks send each other integers.
#include "gpu/ranks/mpi_collectives.h"

#include <gtest/gtest.h>

#include <string_view>

#include "cpu_optim/rank_sum.h"
#include "gpu/ranks/host_neighbors.h"
#include "tests/contract/collectives_contract.h"

namespace sluice {
namespace {

RankPath path = RankPath::kBest;
std::uint32_t direct_ranks_max = 16;

MpiWorld& world() {
  static MpiWorld instance(
      {.timeout_s = 60, .sum = sum_in_order, .path = path, .direct_ranks_max = direct_ranks_max});
  return instance;
}

// One device and one object for all cases: an object joins its world once.
void run_here(const RankBody& body) {
  MpiWorld& mpi = world();
  static const auto device = make_host_device({.memory_bytes = 256_MiB});
  static const auto collectives = mpi.join(*device);
  body(*collectives, *device);
}

INSTANTIATE_TEST_SUITE_P(Mpi, CollectivesContract,
                         testing::Values(CollectivesFactory{"mpi", run_here}),
                         collectives_factory_name);

// Where a system refuses, the cases above would all run by messages.
TEST(MpiWorld, RanksOfThisHostReadEachOthersMemory) {
  EXPECT_EQ(world().neighbor_count(), world().rank_count() - 1);
}

// The shared segment has so many places, and what is opened later has none.
TEST(MpiWorld, SequencesBeyondThePlacesOfTheSegmentUseMessages) {
  run_here([](Collectives& ranks, Device& device) {
    std::vector<std::uint32_t> all;
    for (std::uint32_t i = 0; i < ranks.rank_count(); ++i) all.push_back(i);
    const Stream stream(device, "test");
    constexpr std::uint64_t kShard = 3000;
    RankArray source(device, kShard);
    for (std::uint64_t i = 0; i < kShard; ++i) source.host().data()[i] = rank_byte(ranks.rank(), i);
    source.push(stream.id());
    for (std::uint32_t sequence = 0; sequence < HostNeighbors::kPlaces + 2; ++sequence) {
      const auto opened = ranks.open(all);
      RankArray target(device, kShard * ranks.rank_count());
      opened->all_gather({.target = target.data(),
                          .source = source.data(),
                          .shard_bytes = kShard,
                          .subject = "gathered"},
                         stream.id());
      target.pull(stream.id());
      for (std::uint64_t i = 0; i < kShard * ranks.rank_count(); ++i)
        ASSERT_EQ(target.host().data()[i],
                  rank_byte(static_cast<std::uint32_t>(i / kShard), i % kShard));
    }
  });
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const std::string_view name = argc > 1 ? argv[1] : "best";
  if (name != "best" && name != "messages" && name != "reading" && name != "rounds") return 2;
  if (name == "messages" || name == "rounds") sluice::path = sluice::RankPath::kMessages;
  if (name == "rounds") sluice::direct_ranks_max = 2;
  if (name == "reading") sluice::path = sluice::RankPath::kReading;
  return RUN_ALL_TESTS();
}
