// Collectives over NCCL against stand-ins for it and for the CUDA runtime: the contract, failures,
// what is asked of which version. Ranks are threads of one process. Runs without a GPU.
#include "gpu/ranks/nccl_collectives.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cpu_optim/rank_sum.h"
#include "gpu/ranks/exchanged_sum.h"
#include "tests/contract/collectives_contract.h"
#include "tests/gpu/cuda/fake_cuda_runtime.h"
#include "tests/gpu/ranks/fake_nccl_ranks.h"
#include "tests/support/expect_error.h"
#include "tests/support/hang_guard.h"

namespace sluice {

namespace {

CollectivesFactory factory(std::uint32_t ranks, const std::string& name) {
  return {name, [ranks](const RankBody& body) {
            run_threads(ranks, {.timeout_s = 60, .library = FAKE_NCCL}, body);
          }};
}

INSTANTIATE_TEST_SUITE_P(FakeNccl, CollectivesContract,
                         testing::Values(factory(1, "one"), factory(2, "two"), factory(3, "three"),
                                         factory(4, "four")),
                         collectives_factory_name);

TEST(NcclFailure, RankThatDoesNotComeIsNoticedWithOperationAndSubject) {
  std::atomic<int> named = 0;
  std::atomic<int> heard = 0;
  std::atomic<int> finished = 0;
  run_threads(3, {.timeout_s = 2, .library = FAKE_NCCL}, [&](Collectives& ranks, Device& device) {
    const Stream stream(device, "test");
    if (ranks.rank() == 1) {
      while (finished < 2) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      return;
    }
    ranks.on_failure([&](const Error&) { ++heard; });
    const DeviceBuffer data(device, 3 * 4096, "a test");
    ranks.all_gather({.target = data.data(),
                      .source = data.data() + ranks.rank() * 4096,
                      .shard_bytes = 4096,
                      .subject = "h.3"},
                     stream.id());
    const std::string failure = failure_of(device, stream);
    const bool is_own =
        failure.starts_with("all_gather of \"h.3\" has waited for other ranks for 2 s");
    // The first one ends the other one's wait, as a process that exits does.
    const bool is_others = failure.find("remote process exited") != std::string::npos &&
                           failure.find("all_gather of \"h.3\"") != std::string::npos;
    named += is_own || is_others ? 1 : 0;
    EXPECT_TRUE(is_own || is_others) << failure;
    // Later operations fail with it at once, and nothing waits.
    ranks.barrier("later", stream.id());
    EXPECT_EQ(failure_of(device, stream), failure);
    ++finished;
  });
  EXPECT_EQ(named, 2);
  EXPECT_EQ(heard, 2);
}

// The start of a communicator, of its parts and of its end are one wait.
TEST(NcclFailure, RankThatDoesNotJoinIsAnErrorOfTheOthers) {
  const auto device = make_cuda_device({.memory_bytes = 64_MiB});
  const NcclId id = make_nccl_id(FAKE_NCCL);
  const std::string message = test::expect_error(ErrorCode::kRanks, [&] {
    (void)make_nccl_collectives(*device, {.timeout_s = 0.3, .library = FAKE_NCCL}, id, 0, 2);
  });
  EXPECT_NE(message.find("ncclCommInitRankConfig has waited for other ranks for more than 0.3 s"),
            std::string::npos)
      << message;
}

// Failures of two ranks whose barrier is behind a computation that takes longer than the timeout.
int failures_behind_computation(double timeout_s) {
  std::atomic<int> failures = 0;
  run_threads(2, {.timeout_s = timeout_s, .library = FAKE_NCCL},
              [&](Collectives& ranks, Device& device) {
                const Stream stream(device, "test");
                auto& cuda = dynamic_cast<CudaDevice&>(device);
                test::launch_fake_cuda(cuda.native_stream(stream.id()), [timeout_s] {
                  std::this_thread::sleep_for(std::chrono::duration<double>(2.5 * timeout_s));
                });
                ranks.barrier("behind computation", stream.id());
                failures += failure_of(device, stream) == "no failure" ? 0 : 1;
              });
  return failures;
}

// A late computation before an operation is not the other ranks' fault. On a machine that is busy
// the ranks may come to the barrier further apart than the timeout: then it is raised.
TEST(NcclFailure, DeadlineCountsFromTheBeginningOfTheOperation) {
  double timeout_s = 1;
  while (timeout_s < 10 && failures_behind_computation(timeout_s) != 0) timeout_s *= 2;
  EXPECT_LT(timeout_s, 10);
}

// A call that blocks until the abort: the watch knows of the operation before the call returns.
TEST(NcclFailure, ACallThatBlocksIsAborted) {
  std::atomic<int> ended = 0;
  run_threads(2, {.timeout_s = 2, .library = FAKE_NCCL}, [&](Collectives& ranks, Device& device) {
    const Stream stream(device, "test");
    if (ranks.rank() == 0) hang_fake_nccl(FAKE_NCCL, true);
    if (ranks.rank() == 0) ranks.barrier("one that blocks", stream.id());
    while (ranks.rank() != 0 && ended == 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (ranks.rank() == 0) {
      const std::string failure = failure_of(device, stream);
      EXPECT_NE(failure.find("barrier of \"one that blocks\" has waited for other ranks"),
                std::string::npos)
          << failure;
      hang_fake_nccl(FAKE_NCCL, false);
      ++ended;
    }
  });
}

// The device would leave out the copy of the rank's own data, and the others get what was there.
TEST(NcclFailure, ADeviceThatHasFailedTakesNoPart) {
  run_threads(2, {.timeout_s = 60, .library = FAKE_NCCL}, [&](Collectives& ranks, Device& device) {
    const Stream stream(device, "test");
    const DeviceBuffer data(device, 4096, "a test");
    if (ranks.rank() == 0)
      static_cast<CudaDevice&>(device).fail(Error(ErrorCode::kRanks, "a test's failure"));
    ranks.broadcast({.data = data.data(), .size_bytes = 8, .subject = "news"}, stream.id());
    const std::string failure = failure_of(device, stream);
    EXPECT_NE(failure, "");
    if (ranks.rank() == 0) return;
    EXPECT_NE(failure.find("remote process exited"), std::string::npos) << failure;
  });
}

TEST(NcclFailure, AbortEndsTheOthersWork) {
  std::atomic<int> ended = 0;
  std::atomic<int> met = 0;
  run_threads(2, {.timeout_s = 60, .library = FAKE_NCCL}, [&](Collectives& ranks, Device& device) {
    const Stream stream(device, "test");
    ranks.barrier("both are there", stream.id());
    device.synchronize(stream.id());
    ++met;
    while (met < 2) std::this_thread::yield();  // it is not the first barrier that ends
    if (ranks.rank() == 1) return ranks.abort("the disk is full");
    ranks.barrier("h.3", stream.id());
    const std::string failure = failure_of(device, stream);
    ended += failure.find("remote process exited") != std::string::npos ? 1 : 0;
    EXPECT_NE(failure.find("h.3"), std::string::npos) << failure;
  });
  EXPECT_EQ(ended, 1);
}

// A thread that learns of a failure may look for results at once, and finds the device's failure.
// And no operation has ended before, which would look like a result.
// NCCL's abort of the first communicator waits for the second one's operation, which is in front.
TEST(NcclFailure, EndsOperationsOfTwoCommunicatorsOnOneStream) {
  std::atomic<int> ended = 0;
  run_threads(2, {.timeout_s = 2, .library = FAKE_NCCL}, [&](Collectives& ranks, Device& device) {
    const std::vector<std::uint32_t> both = {0, 1};
    const auto group = ranks.open(both);
    const Stream stream(device, "test");
    if (ranks.rank() == 1) {
      while (ended == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return;
    }
    const test::HangGuard guard("the aborts");
    group->barrier("in front", stream.id());
    ranks.barrier("behind", stream.id());
    const std::string failure = failure_of(device, stream);
    EXPECT_NE(failure.find("barrier of \"in front\" has waited"), std::string::npos) << failure;
    ++ended;
  });
}

TEST(NcclFailure, OfARankThatCannotOpenASequenceIsTold) {
  run_threads(2, {.timeout_s = 60, .library = FAKE_NCCL}, [](Collectives& ranks, Device& device) {
    const std::vector<std::uint32_t> both = {0, 1};
    const std::uint64_t left = device.capacity_bytes() - device.allocated_bytes();
    const DeviceBuffer all(device, ranks.rank() == 0 ? left : 4096, "a test");
    const std::string own = ranks.rank() == 0 ? "opening a sequence" : "remote process exited";
    try {
      (void)ranks.open(both);
      ADD_FAILURE() << "opened";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(own), std::string::npos) << error.what();
    }
  });
}

void fail_without_end() {
  run_threads(2, {.timeout_s = 60, .abort_s = 0.2, .library = FAKE_NCCL},
              [](Collectives& ranks, Device&) {
                hang_fake_nccl_aborts(FAKE_NCCL, true);
                ranks.abort("the disk is full");
              });
}

TEST(NcclFailureDeathTest, WithoutEndEndsTheProcess) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(fail_without_end(), testing::ExitedWithCode(1),
              "NCCL has not ended its work 0.2 s after a failure");
}

TEST(NcclFailure, IsTheDevicesBeforeAnyoneHearsAndBeforeAnythingIsEnded) {
  std::atomic<int> heard = 0;
  std::atomic<int> arrived = 0;
  run_threads(2, {.timeout_s = 60, .library = FAKE_NCCL}, [&](Collectives& ranks, Device& device) {
    const Stream stream(device, "test");
    ranks.barrier("both are there", stream.id());
    device.synchronize(stream.id());
    ++arrived;
    while (arrived < 2) std::this_thread::yield();  // a rank that still waited would see the abort
    if (ranks.rank() == 1) {
      while (heard == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      return;
    }
    const Stream idle(device, "idle");
    ranks.on_failure([&](const Error& error) {
      EXPECT_EQ(take_counts().aborts, 0);
      EXPECT_EQ(failure_of(device, idle), error.what());
      ++heard;
    });
    ranks.barrier("h.3", stream.id());
    (void)take_counts();
    ranks.abort("the disk is full");
    EXPECT_NE(failure_of(device, stream), "no failure");
    ranks.on_failure({});
  });
  EXPECT_EQ(heard, 1);
}

// The call that fails, of a rank that has another operation under way.
TEST(NcclFailure, OfACallIsTheDevicesBeforeItEndsAnythingElse) {
  std::atomic<int> heard = 0;
  std::atomic<int> opened = 0;
  run_threads(2, {.timeout_s = 60, .library = FAKE_NCCL}, [&](Collectives& ranks, Device& device) {
    const std::vector<std::uint32_t> both = {0, 1};
    const auto group = ranks.open(both);
    if (ranks.rank() == 1) {
      ++opened;
      while (heard == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      return;
    }
    const Stream waiting(device, "waiting");
    const Stream idle(device, "idle");
    const DeviceBuffer data(device, 4096, "a test");
    while (opened == 0) std::this_thread::yield();
    ranks.on_failure([&](const Error& error) {
      EXPECT_EQ(take_counts().aborts, 0);
      EXPECT_EQ(failure_of(device, idle), error.what());
      ++heard;
    });
    group->barrier("under way", waiting.id());
    (void)take_counts();
    (void)fail_fake_nccl(FAKE_NCCL, {.at_call = 1});
    group->broadcast({.data = data.data(), .size_bytes = 64, .subject = "news"}, waiting.id());
    (void)fail_fake_nccl(FAKE_NCCL, {});
    EXPECT_NE(failure_of(device, waiting).find("in broadcast of \"news\""), std::string::npos);
    ranks.on_failure({});
  });
  EXPECT_EQ(heard, 1);
}

TEST(NcclLibraryTest, WhatCannotBeUsedIsSaid) {
  const auto message = [](const std::string& path) {
    const std::string why = why_no_nccl(path);
    EXPECT_NE(why, "");
    return why;
  };
  EXPECT_EQ(why_no_nccl(FAKE_NCCL), "");
  EXPECT_NE(message("/nowhere/libnccl.so.2").find("/nowhere/libnccl.so.2"), std::string::npos);
  EXPECT_NE(message("libm.so.6").find("ncclCommInitRankConfig"), std::string::npos);
  const Version version("21602");
  EXPECT_NE(message(fake_of("/./././././.")).find("2.16.2; install release 2.18.1"),
            std::string::npos);
}

// Another thread makes the calls, in order, and has made them when the object is gone.
TEST(NcclHandedOver, WorkRunsInOrderOnAThreadOfItsOwn) {
  run_threads(2, {.timeout_s = 60, .library = FAKE_NCCL}, [](Collectives& ranks, Device& device) {
    EXPECT_TRUE(ranks.may_block());
    const std::vector<std::uint32_t> both = {0, 1};
    auto group = ranks.open(both);
    const Stream stream(device, "test");
    std::vector<int> order;
    std::set<std::thread::id> threads;
    hold_fake_nccl(FAKE_NCCL, 1);
    for (int i = 0; i < 5; ++i) {
      Collectives& of = i % 2 == 0 ? *group : ranks;
      of.hand_over([&, i] {
        of.barrier("handed over", stream.id());
        order.push_back(i);
        threads.insert(std::this_thread::get_id());
      });
    }
    hold_fake_nccl(FAKE_NCCL, -1);
    group.reset();
    EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4}));
    EXPECT_EQ(threads.size(), 1u);
    EXPECT_FALSE(threads.contains(std::this_thread::get_id()));
    device.synchronize(stream.id());
  });
}

// Every type of element, and arrays that lie at odd places.
TEST(NcclKernels, AreLoadedBeforeThereIsACommunicator) {
  test::unload_fake_cuda_kernels();
  (void)test::take_fake_cuda_late_loads();
  run_threads(3, {.timeout_s = 60, .library = FAKE_NCCL}, [](Collectives& ranks, Device& device) {
    const Stream stream(device, "test");
    for (const DType type : {DType::kFp32, DType::kBf16, DType::kFp16}) {
      for (const std::uint64_t shift : {0u, 1u}) {
        const DeviceBuffer data(device, 4096, "a test");
        ranks.all_reduce({.data = data.data() + shift * size_of(type),
                          .type = type,
                          .element_count = 500,
                          .subject = "sum"},
                         stream.id());
        device.synchronize(stream.id());
      }
    }
  });
  EXPECT_EQ(test::take_fake_cuda_late_loads(), std::set<std::string>());
}

// Every way in which arrays may lie, against the sum over arrays of the host.
TEST(ExchangedSumTest, EqualsTheOrderedSum) {
  const auto device = make_cuda_device({.memory_bytes = 64_MiB});
  const Stream stream(*device, "test");
  for (const std::uint32_t ranks : {1u, 2u, 5u}) {
    for (const DType source_type : {DType::kFp32, DType::kBf16, DType::kFp16}) {
      for (const DType target_type : {source_type, DType::kFp32}) {
        for (const std::uint64_t count : {1u, 7u, 8u, 64u, 1001u}) {
          for (const std::uint64_t shift : {0u, 1u}) {
            const std::uint64_t stride = align_up(count, 64);
            const std::uint64_t bytes = size_of(source_type);
            std::vector<std::vector<std::byte>> of_rank(ranks);
            DeviceBuffer own(*device, (count + 8) * 4, "own");
            DeviceBuffer received(*device, ranks * stride * bytes, "received");
            DeviceBuffer target(*device, (count + 8) * 4, "target");
            const auto rank = static_cast<std::uint32_t>(count % ranks);
            std::vector<const void*> sources;
            for (std::uint32_t r = 0; r < ranks; ++r) {
              of_rank[r].resize(count * bytes);
              for (std::uint64_t i = 0; i < count; ++i)
                save_value(source_type, of_rank[r].data(), i, rank_value(r, i));
              sources.push_back(of_rank[r].data());
              std::byte* const place =
                  r == rank ? own.data() + shift * bytes
                            : received.data() + (r < rank ? r : r - 1) * stride * bytes;
              std::memcpy(place, of_rank[r].data(), count * bytes);
            }
            std::vector<std::byte> expected(count * size_of(target_type));
            sum_in_order_reference({.target = expected.data(),
                                    .target_type = target_type,
                                    .sources = sources,
                                    .source_type = source_type,
                                    .element_count = count});
            make_cuda_sum (*device)({.target = target.data(),
                                     .target_type = target_type,
                                     .own = own.data() + shift * bytes,
                                     .received = received.data(),
                                     .received_stride = stride,
                                     .source_type = source_type,
                                     .rank = rank,
                                     .rank_count = ranks,
                                     .element_count = count},
                                    stream.id());
            device->synchronize(stream.id());
            ASSERT_EQ(std::memcmp(target.data(), expected.data(), expected.size()), 0)
                << ranks << " " << name_of(source_type) << " " << count << " " << shift;
            ASSERT_EQ(target.data()[expected.size()], std::byte{0}) << "beyond the end";
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace sluice
