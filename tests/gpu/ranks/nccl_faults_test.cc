// Each call of NCCL fails once, on whichever rank makes it, over the stand-in: an error of the
// ranks, or the right bytes. Never a hang, never a crash, never a silent wrong. Ranks are threads
// of one process. Runs without a GPU.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "gpu/ranks/nccl_collectives.h"
#include "tests/contract/collectives_contract_fixture.h"
#include "tests/gpu/cuda/fake_cuda_runtime.h"
#include "tests/gpu/ranks/fake_nccl.h"
#include "tests/support/hang_guard.h"

namespace sluice {
namespace {

constexpr std::uint32_t kRanks = 2;
constexpr std::uint64_t kElements = 1000;

struct RankResult {
  std::vector<std::byte> bytes;
  std::string failure;  // empty: none

  bool operator==(const RankResult&) const = default;
};

// Every operation once. Returns the bytes that they leave.
std::vector<std::byte> use_everything(Collectives& ranks, Device& device) {
  const Stream stream(device, "test");
  const std::uint32_t rank = ranks.rank();
  RankArray data(device, kRanks * kElements * sizeof(float));
  for (std::uint64_t i = 0; i < kRanks * kElements; ++i)
    save_value(DType::kFp32, data.host().data(), i, rank_value(rank, i));
  data.push(stream.id());
  device.synchronize(stream.id());  // no copy is under way when a later call throws
  const auto all = std::array<std::uint32_t, kRanks>{0, 1};
  const auto group = ranks.open(all);
  group->use_memory({data.data(), kRanks * kElements * sizeof(float)});
  std::byte* const own = data.data() + rank * kElements * sizeof(float);
  group->reduce_scatter({.target = own,
                         .target_type = DType::kFp32,
                         .source = data.data(),
                         .source_type = DType::kFp32,
                         .shard_elements = kElements,
                         .subject = "shards"},
                        stream.id());
  group->all_gather({.target = data.data(),
                     .source = own,
                     .shard_bytes = kElements * sizeof(float),
                     .subject = "parameters"},
                    stream.id());
  ranks.all_reduce({.data = data.data(), .element_count = kElements, .subject = "sum"},
                   stream.id());
  ranks.all_reduce_integers(
      {.data = data.data() + 4096, .sum_count = 2, .minimum_count = 1, .subject = "votes"},
      stream.id());
  ranks.broadcast({.data = data.data(), .size_bytes = 512, .root = 1, .subject = "news"},
                  stream.id());
  ranks.barrier("the end", stream.id());
  data.pull(stream.id());
  group->forget_memory();
  return {data.host().data(), data.host().data() + kRanks * kElements * sizeof(float)};
}

std::vector<RankResult> run_ranks(double timeout_s) {
  std::vector<RankResult> results(kRanks);
  const auto run = [&](const NcclId& id, std::uint32_t rank) {
    try {
      const auto device = make_cuda_device({.ordinal = static_cast<int>(rank) + 1,
                                            .memory_bytes = 64_MiB,
                                            .memory_source = nccl_memory_source(FAKE_NCCL)});
      const auto collectives = make_nccl_collectives(
          *device, {.timeout_s = timeout_s, .library = FAKE_NCCL}, id, rank, kRanks);
      results[rank].bytes = use_everything(*collectives, *device);
    } catch (const Error& error) {
      results[rank].failure = error.what();
    }
  };
  try {
    const NcclId id = make_nccl_id(FAKE_NCCL);
    std::vector<std::thread> threads;
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) threads.emplace_back(run, id, rank);
    for (std::thread& thread : threads) thread.join();
  } catch (const Error& error) {
    for (RankResult& result : results) result.failure = error.what();
  }
  return results;
}

bool names_the_failure(const std::string& failure) {
  for (const char* const words : {"an error of the fake", "remote process exited",
                                  "has waited for other ranks", "out of memory", " free of "})
    if (failure.find(words) != std::string::npos) return true;
  return false;
}

// Lets calls of a run fail, each in a run of its own: the first, and as many more, spread over the
// run, as `cases_max` leaves. The number of questions follows the time that a run takes. Returns
// the ranks that ended with an error.
unsigned fail_calls(bool is_poll, std::uint64_t cases_max) {
  (void)fail_fake_nccl(FAKE_NCCL, {.is_poll = is_poll});
  const std::vector<RankResult> expected = run_ranks(60);
  const std::uint64_t calls = fail_fake_nccl(FAKE_NCCL, {});
  const std::uint64_t allocated = test::fake_cuda_allocated_bytes();
  for (const RankResult& result : expected) EXPECT_EQ(result.failure, "");
  EXPECT_GT(calls, is_poll ? 0u : 40u) << "the cases show little";
  const std::uint64_t stride = (calls + cases_max - 1) / cases_max;
  unsigned errors = 0;
  for (std::uint64_t at = 1; at <= calls; at += stride) {
    const std::string what = (is_poll ? "question " : "call ") + std::to_string(at);
    SCOPED_TRACE(what);
    const test::HangGuard guard(what);
    (void)fail_fake_nccl(FAKE_NCCL, {.at_call = at, .is_poll = is_poll});
    // Short, because a rank that never joins is noticed by the time alone.
    const std::vector<RankResult> results = run_ranks(2);
    (void)fail_fake_nccl(FAKE_NCCL, {});
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      if (results[rank].failure.empty()) {
        EXPECT_TRUE(results[rank].bytes == expected[rank].bytes) << "a silent wrong";
        continue;
      }
      ++errors;
      EXPECT_TRUE(names_the_failure(results[rank].failure)) << results[rank].failure;
    }
    EXPECT_EQ(test::fake_cuda_allocated_bytes(), allocated);
  }
  return errors;
}

TEST(NcclFaults, ACallThatFailsOnceIsAnErrorOfTheRanksOrDoesNoHarm) {
  EXPECT_GT(fail_calls(/*is_poll=*/false, 1000), 40u);
}

// A suite of its own, so that it runs beside the other. The first question is there in every run.
TEST(NcclBackgroundFaults, AnErrorInTheBackgroundIsAnErrorOfTheRanks) {
  EXPECT_GT(fail_calls(/*is_poll=*/true, 40), 0u);
}

}  // namespace
}  // namespace sluice
