// Reductions over NCCL against stand-ins for it and for the CUDA runtime: exact or NCCL's own,
// their bits in many steps, the length of messages among many ranks. Runs without a GPU.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <string>

#include <fmt/format.h>

#include "tests/gpu/cuda/fake_cuda_log.h"
#include "tests/gpu/ranks/fake_nccl_ranks.h"
#include "tests/support/expect_error.h"

namespace sluice {
namespace {

// Steps that overlap: sums that are late are not overwritten by the messages after the next, and
// work after the reduction waits for the last sum.
TEST(NcclReductions, OfManyStepsHaveTheBitsOfOne) {
  constexpr std::uint32_t kRanks = 3;
  constexpr std::uint64_t kShare = 3'000'001;  // bf16: 5.7 MiB, in three steps
  (void)take_counts();
  test::delay_fake_cuda_kernels(std::chrono::milliseconds(20));
  run_threads(
      kRanks, {.timeout_s = 60, .library = FAKE_NCCL}, [&](Collectives& ranks, Device& device) {
        ranks.prepare_reductions();
        const Stream stream(device, "test");
        RankArray data(device, kRanks * kShare * 2);
        for (std::uint64_t i = 0; i < kRanks * kShare; ++i)
          save_value(DType::kBf16, data.host().data(), i, rank_value(ranks.rank(), i));
        data.push(stream.id());
        std::byte* const own = data.data() + ranks.rank() * kShare * 2;
        ranks.reduce_scatter({.target = own,
                              .target_type = DType::kBf16,
                              .source = data.data(),
                              .source_type = DType::kBf16,
                              .shard_elements = kShare,
                              .subject = "many"},
                             stream.id());
        data.pull(stream.id());
        std::uint64_t unequal = 0;
        for (std::uint64_t i = ranks.rank() * kShare; i < (ranks.rank() + 1) * kShare; ++i) {
          const float expected = expected_sum(DType::kBf16, DType::kBf16, kRanks, i);
          if (load_value(DType::kBf16, data.host().data(), i) != expected) ++unequal;
        }
        EXPECT_EQ(unequal, 0u);
      });
  test::delay_fake_cuda_kernels({});
  EXPECT_EQ(take_counts().messages, 3 * static_cast<int>(kRanks * (kRanks - 1)));
}

// A vote has sums and ranges, and takes one launch on each rank.
TEST(NcclReductions, AVoteOfSumsAndMinimaIsOneLaunch) {
  constexpr std::uint32_t kRanks = 3;
  (void)take_counts();
  run_threads(kRanks, {.timeout_s = 60, .library = FAKE_NCCL},
              [&](Collectives& ranks, Device& device) {
                const Stream stream(device, "test");
                RankArray data(device, 5 * sizeof(std::uint64_t));
                auto* const words = reinterpret_cast<std::uint64_t*>(data.host().data());
                for (std::uint64_t i = 0; i < 5; ++i) words[i] = 10 * i + ranks.rank();
                data.push(stream.id());
                ranks.all_reduce_integers(
                    {.data = data.data(), .sum_count = 2, .minimum_count = 3, .subject = "a vote"},
                    stream.id());
                data.pull(stream.id());
                EXPECT_EQ(words[0], 0u + 1 + 2);
                EXPECT_EQ(words[1], 10u + 11 + 12);
                for (std::uint64_t i = 2; i < 5; ++i) EXPECT_EQ(words[i], 10 * i);
              });
  EXPECT_EQ(take_counts().word_launches, static_cast<int>(kRanks));
}

// One of 1,024 ranks, one of 128 nodes, and one of the 8 ranks of a node: counted over the
// stand-in.
TEST(NcclReductions, MessagesStayLongAmongManyRanks) {
  constexpr std::uint32_t kRank = 5;
  leave_fake_nccl_alone(FAKE_NCCL, true);
  struct Case {
    std::uint32_t ranks;
    std::uint64_t share;  // elements of a rank, for two or more steps
  };
  for (const Case& c : {Case{1024, 530'001}, Case{128, 600'001}, Case{8, 700'000}}) {
    const auto device = make_cuda_device({.ordinal = 1, .memory_bytes = 1200_MiB});
    const auto ranks = make_nccl_collectives(*device, {.timeout_s = 60, .library = FAKE_NCCL},
                                             make_nccl_id(FAKE_NCCL), kRank, c.ranks);
    ranks->prepare_reductions();
    const Stream stream(*device, "test");
    // The stand-in reads nothing of the other ranks' parts, so they need no memory.
    const DeviceBuffer own(*device, c.share * 2, "a test");
    const DeviceBuffer target(*device, c.share * 4, "a test");
    (void)take_counts();
    ranks->reduce_scatter({.target = target.data(),
                           .target_type = DType::kFp32,
                           .source = own.data() - kRank * c.share * 2,
                           .source_type = DType::kBf16,
                           .shard_elements = c.share,
                           .subject = "a unit"},
                          stream.id());
    device->synchronize(stream.id());
    const fake_nccl_counts counts = take_counts();
    EXPECT_GE(counts.messages, static_cast<int>(2 * (c.ranks - 1)));
    EXPECT_GE(counts.message_bytes_least, 256_KiB) << c.ranks << " ranks";
    // A row of docs/results/gpu.md.
    fmt::print("figure: | {} | {} | {} | {:.0f} KiB |\n", c.ranks, c.share, counts.messages,
               static_cast<double>(counts.message_bytes_least) / 1024);
  }
  leave_fake_nccl_alone(FAKE_NCCL, false);
}

// The memory of many ranks' messages.
TEST(NcclReductions, MemoryThatTheGpuDoesNotHaveIsRefused) {
  leave_fake_nccl_alone(FAKE_NCCL, true);
  {
    const auto device = make_cuda_device({.ordinal = 1, .memory_bytes = 100_MiB});
    const auto ranks = make_nccl_collectives(*device, {.timeout_s = 60, .library = FAKE_NCCL},
                                             make_nccl_id(FAKE_NCCL), 0, 128);
    const std::string message =
        test::expect_error(ErrorCode::kOutOfMemory, [&] { ranks->prepare_reductions(); });
    EXPECT_NE(message.find("NCCL receive buffer"), std::string::npos) << message;
  }
  leave_fake_nccl_alone(FAKE_NCCL, false);
}

// Exactly: bits in rank order, without NCCL's sums. Plainly: NCCL's sums, near those.
TEST(NcclReductionChoice, PlainIsNcclsOwnAndExactIsNot) {
  for (const NcclReduction reduction : {NcclReduction::kExact, NcclReduction::kPlain}) {
    (void)take_counts();
    run_threads(3, {.timeout_s = 60, .reduction = reduction, .library = FAKE_NCCL},
                [&](Collectives& ranks, Device& device) {
                  const Stream stream(device, "test");
                  constexpr std::uint64_t kCount = 5000;
                  RankArray data(device, kCount * sizeof(float));
                  for (std::uint64_t i = 0; i < kCount; ++i)
                    save_value(DType::kFp32, data.host().data(), i, rank_value(ranks.rank(), i));
                  data.push(stream.id());
                  ranks.all_reduce({.data = data.data(), .element_count = kCount, .subject = "sum"},
                                   stream.id());
                  data.pull(stream.id());
                  int unequal = 0;
                  for (std::uint64_t i = 0; i < kCount; ++i) {
                    const float expected = expected_sum(DType::kFp32, DType::kFp32, 3, i);
                    const float actual = load_value(DType::kFp32, data.host().data(), i);
                    float magnitude = 0;  // of the values, which may cancel out
                    for (std::uint32_t rank = 0; rank < 3; ++rank)
                      magnitude += std::abs(rank_value(rank, i));
                    EXPECT_NEAR(actual, expected, 1e-6f * magnitude);
                    unequal += actual != expected ? 1 : 0;
                  }
                  if (reduction == NcclReduction::kExact)
                    EXPECT_EQ(unequal, 0);
                  else
                    EXPECT_GT(unequal, 0) << "the case shows nothing";
                });
    EXPECT_EQ(take_counts().reductions, reduction == NcclReduction::kExact ? 0 : 3);
  }
}

}  // namespace
}  // namespace sluice
