// The limits of another version of NCCL, and of a machine without multicast, over the stand-ins:
// each is named with what is done instead. Runs without a GPU.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/gpu/ranks/fake_nccl_ranks.h"
#include "tests/support/expect_error.h"

namespace sluice {
namespace {

TEST(NcclLimits, WhatIsDoneInsteadIsTold) {
  struct Case {
    const char* version;
    const char* dots;
    const char* multicast;
    const char* note;  // null: nothing is lacking
    int buffers;
  };
  for (const Case& c :
       {Case{"21805", "/.", "", "NCCL 2.18.5 cannot register memory, as 2.19.1 can", 0},
        Case{"22707", "/././.", "", "NCCL 2.27.7 has no windows for copy engines", 2},
        Case{"22809", "/./././.", "", nullptr, 0},
        Case{"22809", "/./././.", "absent", "NCCL 2.28.9 makes no windows on this machine", 2}}) {
    const Version version(c.version);
    const EnvironmentValue multicast("FAKE_NCCL_MULTICAST", c.multicast);
    (void)take_counts();
    run_threads(2, {.timeout_s = 60, .library = fake_of(c.dots)},
                [&](Collectives& ranks, Device& device) {
                  const DeviceBuffer memory(device, 1_MiB, "a test");
                  ranks.use_memory({memory.data(), memory.size_bytes()});
                  const std::vector<std::string> notes = ranks.notes();
                  ASSERT_EQ(notes.size(), c.note == nullptr ? 0u : 1u);
                  if (c.note != nullptr) {
                    EXPECT_EQ(notes.front().find(c.note), 0u) << notes.front();
                    EXPECT_NE(notes.front().find(": "), std::string::npos) << "done instead";
                  }
                  const Stream stream(device, "test");
                  ranks.barrier("counted", stream.id());
                  device.synchronize(stream.id());
                  const int buffers = ranks.rank() == 0 ? take_counts().buffers : c.buffers;
                  EXPECT_EQ(buffers, c.buffers) << c.version;
                  ranks.barrier("taken", stream.id());
                  device.synchronize(stream.id());
                  ranks.forget_memory();
                });
    EXPECT_EQ(take_counts().buffers, -c.buffers) << "as many are given back";
  }
}

// As real NCCL, which reads the variable once: only the one who starts the ranks can set it.
TEST(NcclLimits, MulticastThatDoesNotWorkIsNamedWithTheVariable) {
  const EnvironmentValue multicast("FAKE_NCCL_MULTICAST", "broken");
  const auto device = make_cuda_device({.memory_bytes = 64_MiB});
  const NcclId id = make_nccl_id(FAKE_NCCL);
  const std::string message = test::expect_error(ErrorCode::kRanks, [&] {
    (void)make_nccl_collectives(*device, {.timeout_s = 60, .library = FAKE_NCCL}, id, 0, 2);
  });
  for (const char* part : {"ncclCommInitRankConfig", "Multicast", "NCCL_NVLS_ENABLE=0"})
    EXPECT_NE(message.find(part), std::string::npos) << message;
  const EnvironmentValue without("NCCL_NVLS_ENABLE", "0");
  run_threads(2, {.timeout_s = 60, .library = FAKE_NCCL}, [](Collectives& ranks, Device& of_rank) {
    const Stream stream(of_rank, "test");
    ranks.barrier("joined", stream.id());
    EXPECT_EQ(failure_of(of_rank, stream), "no failure");
  });
}

}  // namespace
}  // namespace sluice
