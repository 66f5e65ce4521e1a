// The stand-in for NCCL refuses callers that break NCCL's rules. NCCL itself would hang then, or
// read what is not there. So every test over the stand-in also shows that its callers keep them.
// Runs without a GPU.
#include <gtest/gtest.h>

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "tests/gpu/ranks/fake_nccl_ranks.h"

namespace sluice {
namespace {

constexpr std::uint64_t kBytes = 64_KiB;

// Calls something on each of two ranks.
using Call = std::function<void(Collectives& ranks, std::byte* data, StreamId stream)>;

void expect_refused(const std::string& words, const Call& call,
                    NcclReduction reduction = NcclReduction::kExact) {
  run_threads(2, {.timeout_s = 20, .reduction = reduction, .library = FAKE_NCCL},
              [&](Collectives& ranks, Device& device) {
                const Stream stream(device, "test");
                const DeviceBuffer data(device, kBytes, "a test");
                call(ranks, data.data(), stream.id());
                const std::string failure = failure_of(device, stream);
                EXPECT_NE(failure.find(words), std::string::npos) << failure;
              });
}

TEST(NcclMisuse, KindsOfOperationsDiffer) {
  expect_refused(
      "rank 0 calls broadcast of 64 int8 from rank 0, and rank 1 calls all-gather of 64 int8",
      [](Collectives& ranks, std::byte* data, StreamId stream) {
        if (ranks.rank() == 0)
          return ranks.broadcast({.data = data, .size_bytes = 64, .subject = "news"}, stream);
        ranks.all_gather(
            {.target = data, .source = data + 64, .shard_bytes = 64, .subject = "shards"}, stream);
      });
}

TEST(NcclMisuse, LengthsOfGathersDiffer) {
  expect_refused("rank 0 calls all-gather of 64 int8, and rank 1 calls all-gather of 128 int8",
                 [](Collectives& ranks, std::byte* data, StreamId stream) {
                   const std::uint64_t shard = 64 * (ranks.rank() + 1);
                   ranks.all_gather({.target = data,
                                     .source = data + ranks.rank() * shard,
                                     .shard_bytes = shard,
                                     .subject = "shards"},
                                    stream);
                 });
}

TEST(NcclMisuse, RootsOfBroadcastsDiffer) {
  expect_refused(" int8 from rank 0, and rank 1 calls broadcast of 64 int8 from rank 1",
                 [](Collectives& ranks, std::byte* data, StreamId stream) {
                   ranks.broadcast(
                       {.data = data, .size_bytes = 64, .root = ranks.rank(), .subject = "news"},
                       stream);
                 });
}

TEST(NcclMisuse, TypesOfElementsDiffer) {
  expect_refused(
      "all-reduce of 100 float32 by sum, and rank 1 calls all-reduce of 100 float16 by sum",
      [](Collectives& ranks, std::byte* data, StreamId stream) {
        ranks.all_reduce({.data = data,
                          .type = ranks.rank() == 0 ? DType::kFp32 : DType::kFp16,
                          .element_count = 100,
                          .subject = "sum"},
                         stream);
      },
      NcclReduction::kPlain);
}

TEST(NcclMisuse, ReductionsOfWordsDiffer) {
  expect_refused("uint64 by sum, and rank 1 calls all-reduce of 2 uint64 by minimum",
                 [](Collectives& ranks, std::byte* data, StreamId stream) {
                   const bool is_first = ranks.rank() == 0;
                   ranks.all_reduce_integers({.data = data,
                                              .sum_count = is_first ? 2u : 0u,
                                              .minimum_count = is_first ? 0u : 2u,
                                              .subject = "a vote"},
                                             stream);
                 });
}

TEST(NcclMisuse, AMessageIsLongerThanItsReceiverExpects) {
  expect_refused(" expects ", [](Collectives& ranks, std::byte* data, StreamId stream) {
    const std::uint64_t share = 100 * (ranks.rank() + 1);
    ranks.reduce_scatter(
        {.target = data, .source = data + 4096, .shard_elements = share, .subject = "shards"},
        stream);
  });
}

TEST(NcclMisuse, BuffersLieInsideAnElement) {
  expect_refused(
      "all-reduce of 100 float32 by sum: a buffer that lies inside an element",
      [](Collectives& ranks, std::byte* data, StreamId stream) {
        ranks.all_reduce({.data = data + 2, .element_count = 100, .subject = "sum"}, stream);
      },
      NcclReduction::kPlain);
  expect_refused("all-reduce of 2 uint64 by sum: a buffer that lies inside an element",
                 [](Collectives& ranks, std::byte* data, StreamId stream) {
                   ranks.all_reduce_integers(
                       {.data = data + 4, .sum_count = 2, .subject = "a vote"}, stream);
                 });
}

// Registers memory, and then meets the other rank, which may have registered its own before.
void expect_window_refused(
    const std::string& words,
    const std::function<std::span<std::byte>(std::uint32_t rank, std::byte* data)>& window) {
  expect_refused(words, [&](Collectives& ranks, std::byte* data, StreamId stream) {
    try {
      ranks.use_memory(window(ranks.rank(), data));
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
    ranks.barrier("both", stream);
  });
}

TEST(NcclMisuse, AWindowBeginsOutsideOfItsGrid) {
  expect_window_refused(
      "a window that does not begin at a multiple of 4096 bytes",
      [](std::uint32_t, std::byte* data) { return std::span(data + 256, kBytes - 256); });
}

TEST(NcclMisuse, WindowsDifferInSize) {
  expect_window_refused(" on another rank", [](std::uint32_t rank, std::byte* data) {
    return std::span(data, rank == 0 ? kBytes : kBytes / 2);
  });
}

template <class Function>
Function* nccl(const char* name) {
  return fake_nccl_function<Function>(FAKE_NCCL, name);
}

// A communicator of one rank.
ncclComm_t make_communicator() {
  ncclUniqueId id;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t made = nullptr;
  (void)nccl<decltype(ncclGetUniqueId)>("ncclGetUniqueId")(&id);
  (void)nccl<decltype(ncclCommInitRankConfig)>("ncclCommInitRankConfig")(&made, 1, id, 0, &config);
  ncclResult_t result = ncclInProgress;
  while (result == ncclInProgress)
    (void)nccl<decltype(ncclCommGetAsyncError)>("ncclCommGetAsyncError")(made, &result);
  return made;
}

void use_after(const char* end) {
  const ncclComm_t made = make_communicator();
  int ranks = 0;
  (void)nccl<decltype(ncclCommCount)>("ncclCommCount")(made, &ranks);
  SLUICE_CHECK(ranks == 1, "the communicator works");
  (void)nccl<decltype(ncclCommAbort)>(end)(made);
  (void)make_communicator();  // which does not get the address
  (void)nccl<decltype(ncclBroadcast)>("ncclBroadcast")(nullptr, nullptr, 0, ncclInt8, 0, made,
                                                       nullptr);
}

void question_after(const char* end) {
  const ncclComm_t made = make_communicator();
  (void)nccl<decltype(ncclCommAbort)>(end)(made);
  ncclResult_t result = ncclSuccess;
  (void)nccl<decltype(ncclCommGetAsyncError)>("ncclCommGetAsyncError")(made, &result);
}

TEST(NcclMisuseDeathTest, ACommunicatorIsUsedAfterItsEnd) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const char* const gone = "of a communicator that was destroyed or aborted";
  EXPECT_DEATH(use_after("ncclCommAbort"), std::string("ncclBroadcast ") + gone);
  EXPECT_DEATH(use_after("ncclCommDestroy"), std::string("ncclBroadcast ") + gone);
  EXPECT_DEATH(use_after("ncclCommFinalize"), "ncclBroadcast of a communicator that was finalized");
  EXPECT_DEATH(question_after("ncclCommAbort"), std::string("ncclCommGetAsyncError ") + gone);
}

}  // namespace
}  // namespace sluice
