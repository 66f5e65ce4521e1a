// Cases that need no MPI: waits at the beginning and the end that would never end, and worlds of
// thousands of ranks. They run over a stand-in for the library that is linked to MPI
// (fake_mpi_plugin.cc).
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <sluice/units.h>
#include "cpu_optim/rank_sum.h"
#include "gpu/ranks/mpi_collectives.h"
#include "tests/support/expect_error.h"

namespace sluice {
namespace {

const HostCollectivesOptions kImpatient{.timeout_s = 1, .sum = sum_in_order};

void set_fake(std::uint32_t ranks, const std::string& blocks) {
  ::setenv("FAKE_MPI_RANKS", std::to_string(ranks).c_str(), 1);
  ::setenv("FAKE_MPI_BLOCKS", blocks.c_str(), 1);
}

const std::string kLate =
    " has not ended within 1 s; a rank may have been killed or stopped; if it is only late, "
    "raise sharding.timeout";

TEST(MpiWorldStart, EveryWaitHasADeadlineAndIsNamed) {
  for (const auto& [call, wait] :
       {std::pair{"init", "MPI_Init, which every rank calls,"},
        std::pair{"host_ranks", "the search for the ranks of each host"},
        std::pair{"broadcast", "the sharing of memory among this host's ranks"},
        std::pair{"agree", "the sharing of memory among this host's ranks"}}) {
    set_fake(2, call);
    try {
      const MpiWorld world(kImpatient, FAKE_MPI);
      ADD_FAILURE() << call << " is open";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kRanks) << call;
      EXPECT_EQ(error.what(), wait + kLate);
    }
  }
}

TEST(MpiWorldStart, WhoIsToldToEndMeanwhileHearsWhatIsWaitedFor) {
  set_fake(2, "init");
  std::string said;
  const HostCollectivesOptions options{
      .timeout_s = 0.6, .sum = sum_in_order, .on_wait = [&](const std::string& waiting) {
        said = waiting;
      }};
  EXPECT_THROW(MpiWorld(options, FAKE_MPI), Error);
  EXPECT_EQ(said, "MPI_Init, which every rank calls, has not ended");
}

TEST(MpiWorldStart, ALibraryOfAnotherBuildIsRefused) {
  const std::string said = test::expect_error(
      ErrorCode::kUnsupported, [] { const MpiWorld world(kImpatient, "libm.so.6"); });
  for (const char* const part : {"\"libm.so.6\"", "another build", "install both together"})
    EXPECT_NE(said.find(part), std::string::npos) << said;
}

TEST(MpiWorldEnd, EveryWaitHasADeadlineAndIsNamed) {
  set_fake(2, "finalize");
  {
    MpiWorld world(kImpatient, FAKE_MPI);
    try {
      world.leave();
      ADD_FAILURE() << "it has ended";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kRanks);
      EXPECT_EQ(error.what(), "MPI_Finalize, which every rank calls," + kLate);
    }
    world.abort();  // nothing is left to be ended
  }
  { const MpiWorld silent(kImpatient, FAKE_MPI); }
  set_fake(2, "abort");
  {
    MpiWorld world(kImpatient, FAKE_MPI);
    world.abort();  // the caller ends itself
  }
}

TEST(MpiWorldEnd, AllAtTheEndIsNoFailure) {
  set_fake(2, "");
  MpiWorld world(kImpatient, FAKE_MPI);
  world.leave();
  world.leave();
}

// The others bring zeros. With 8,192 ranks the least step of a reduction takes 2 MiB.
TEST(MpiWorldSize, ReductionsOfThousandsOfRanksHaveRoomForAll) {
  for (const std::uint32_t ranks : {304u, 4097u, 8192u}) {
    set_fake(ranks, "");
    MpiWorld world({.timeout_s = 60, .sum = sum_in_order}, FAKE_MPI);
    const auto device = make_host_device({.memory_bytes = 64_MiB});
    const auto collectives = world.join(*device);
    ASSERT_EQ(collectives->rank_count(), ranks);
    const Stream stream(*device, "test");
    constexpr std::uint64_t kShard = 130;
    const DeviceBuffer source(*device, kShard * ranks * sizeof(float), "a test");
    const DeviceBuffer target(*device, kShard * sizeof(float), "a test");
    auto* const values = reinterpret_cast<float*>(source.data());
    for (std::uint64_t i = 0; i < kShard * ranks; ++i) values[i] = static_cast<float>(i + 1);
    collectives->reduce_scatter({.target = target.data(),
                                 .source = source.data(),
                                 .shard_elements = kShard,
                                 .subject = "h.3"},
                                stream.id());
    device->synchronize(stream.id());
    EXPECT_EQ(std::memcmp(target.data(), source.data(), kShard * sizeof(float)), 0);
    auto* const words = reinterpret_cast<std::uint64_t*>(target.data());
    words[0] = 7;
    words[1] = 9;
    collectives->all_reduce_integers(
        {.data = target.data(), .sum_count = 1, .minimum_count = 1, .subject = "counted"},
        stream.id());
    device->synchronize(stream.id());
    EXPECT_EQ(words[0], 7u);
    EXPECT_EQ(words[1], 0u);
  }
}

}  // namespace
}  // namespace sluice
