// Other versions of NCCL, and a machine without multicast, over the stand-ins: what they lack is
// named with what is done instead, and what they keep is no harm. Runs without a GPU.
#include <gtest/gtest.h>

#include <cuda_runtime.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "tests/gpu/cuda/fake_cuda_runtime.h"
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
    int windows;
  };
  for (const Case& c :
       {Case{"21805", "/.", "", "NCCL 2.18.5 has no windows for copy engines, as 2.28.3 has", 0},
        Case{"22707", "/././.", "", "NCCL 2.27.7 has no windows for copy engines", 0},
        Case{"22809", "/./././.", "", nullptr, 2},
        Case{"22809", "/./././.", "absent", "NCCL 2.28.9 makes no windows on this machine", 0}}) {
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
                  const int windows = ranks.rank() == 0 ? take_counts().windows : c.windows;
                  EXPECT_EQ(windows, c.windows) << c.version;
                  ranks.barrier("taken", stream.id());
                  device.synchronize(stream.id());
                  ranks.forget_memory();
                });
    EXPECT_EQ(take_counts().windows, -c.windows) << "as many are given back";
  }
}

TEST(NcclLibraryTest, RegistersMemoryAsTheVersionCan) {
  struct Case {
    const char* version;
    const char* dots;
    int windows;
  };
  for (const Case& c :
       {Case{"21805", "/.", 0}, Case{"22707", "/././.", 0}, Case{"22809", "/./././.", 2}}) {
    const Version version(c.version);
    const std::string library = fake_of(c.dots);
    (void)take_counts();
    std::atomic<int> arrived = 0;
    run_threads(2, {.timeout_s = 60, .library = library}, [&](Collectives& ranks, Device& device) {
      const DeviceBuffer memory(device, 1_MiB, "a test");
      ranks.use_memory({memory.data(), memory.size_bytes()});
      ++arrived;
      while (arrived < 2) std::this_thread::yield();
      if (ranks.rank() == 0) {
        const fake_nccl_counts counts = take_counts();
        EXPECT_EQ(counts.windows, c.windows) << c.version;
      }
      const Stream stream(device, "test");
      ranks.barrier("counted", stream.id());
      device.synchronize(stream.id());
      ranks.forget_memory();
    });
    const fake_nccl_counts counts = take_counts();
    EXPECT_EQ(counts.windows, -c.windows) << c.version;
  }
}

// NCCL unmaps a window at once. So a rank that goes waits for its operations, and for the other
// ranks in them.
TEST(NcclLibraryTest, AWindowOutlivesItsOperations) {
  run_threads(2, {.timeout_s = 60, .library = FAKE_NCCL}, [](Collectives& ranks, Device& device) {
    const DeviceBuffer memory(device, 1_MiB, "a test");
    ranks.use_memory({memory.data(), memory.size_bytes()});
    const Stream stream(device, "test");
    const Event gathered(device);
    if (ranks.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    ranks.all_gather({.target = memory.data(),
                      .source = memory.data() + ranks.rank() * 4096,
                      .shard_bytes = 4096,
                      .subject = "h.3"},
                     stream.id());
    device.record(gathered.id(), stream.id());
    ranks.forget_memory();
    EXPECT_TRUE(device.is_complete(gathered.id())) << "rank " << ranks.rank();
    device.synchronize(stream.id());
  });
}

// The same for the work that an abort on another thread is about to end.
TEST(NcclLibraryTest, AWindowOutlivesTheAbortOfItsOperations) {
  const NcclId id = make_nccl_id(FAKE_NCCL);
  std::barrier<> together(2);
  std::atomic<bool> is_failing = false;
  std::atomic<bool> is_forgotten = false;
  const auto run = [&](int rank) {
    const auto device = make_cuda_device({.ordinal = rank + 1, .memory_bytes = 64_MiB});
    const auto ranks = make_nccl_collectives(*device, {.timeout_s = 60, .library = FAKE_NCCL}, id,
                                             static_cast<std::uint32_t>(rank), 2);
    const DeviceBuffer memory(*device, 1_MiB, "a test");
    ranks->use_memory({memory.data(), memory.size_bytes()});
    together.arrive_and_wait();
    if (rank == 1) return together.arrive_and_wait();
    const Stream stream(*device, "test");
    ranks->all_gather(
        {.target = memory.data(), .source = memory.data(), .shard_bytes = 4096, .subject = "h.3"},
        stream.id());
    (void)take_counts();
    ranks->on_failure([&](const Error&) { is_failing = true; });
    test::call_at_fake_cuda_gpu_changes([&] {  // as the abort does first
      std::array<char, 16> name{};
      (void)::pthread_getname_np(::pthread_self(), name.data(), name.size());
      for (int i = 0; i < 200 && name.data() == std::string("sluice-abort") && !is_forgotten; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
    std::thread other([&] { ranks->abort("the user has stopped it"); });
    while (!is_failing) std::this_thread::yield();
    ASSERT_EQ(cudaSetDevice(rank + 1), cudaSuccess);
    ranks->forget_memory();
    is_forgotten = true;
    EXPECT_EQ(take_counts().windows, 0) << "one was given back while a gather could use it";
    other.join();
    test::call_at_fake_cuda_gpu_changes({});
    ranks->on_failure({});
    together.arrive_and_wait();
  };
  std::thread second([&] { run(1); });
  run(0);
  second.join();
}

// Up to 2.25 NCCL leaves in the thread what it has begun on a communicator.
TEST(NcclLibraryTest, OneThreadUsesTwoCommunicatorsOfAnOldVersion) {
  const Version version("22403");
  run_threads(2, {.timeout_s = 60, .library = fake_of("/././././././.")},
              [](Collectives& ranks, Device& device) {
                const std::vector<std::uint32_t> both = {0, 1};
                const auto group = ranks.open(both);
                const Stream stream(device, "test");
                for (Collectives* one : {group.get(), &ranks, group.get()})
                  one->barrier("turns", stream.id());
                EXPECT_EQ(failure_of(device, stream), "no failure");
              });
}

TEST(NcclLibraryTest, DeviceMemoryOfWindowsComesFromNccl) {
  (void)take_counts();
  {
    const auto device =
        make_cuda_device({.memory_bytes = 1_MiB, .memory_source = nccl_memory_source(FAKE_NCCL)});
    const DeviceBuffer memory(*device, 4096, "a test");
    EXPECT_EQ(take_counts().allocations, 1);
    EXPECT_EQ(memory.data()[17], std::byte{0});
  }
  EXPECT_EQ(take_counts().allocations, -1);
  const Version version("22707");
  EXPECT_EQ(nccl_memory_source(fake_of("/././././.")).allocate, nullptr);
}

TEST(NcclLimits, VariablesAreSetUnlessTheyAre) {
  ::unsetenv("NCCL_RUNTIME_CONNECT");
  const EnvironmentValue chosen("NCCL_LOCAL_REGISTER", "1");
  prepare_nccl_environment();
  EXPECT_STREQ(std::getenv("NCCL_RUNTIME_CONNECT"), "0");
  EXPECT_STREQ(std::getenv("NCCL_LOCAL_REGISTER"), "1");
  ::unsetenv("NCCL_LOCAL_REGISTER");
  prepare_nccl_environment();
  EXPECT_STREQ(std::getenv("NCCL_LOCAL_REGISTER"), "0");
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
