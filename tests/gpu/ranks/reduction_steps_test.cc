// The steps of exact reductions: they cover every share, fit the staging memory, and have long
// messages.
#include "gpu/ranks/reduction_steps.h"

#include <gtest/gtest.h>

namespace sluice {
namespace {

TEST(ReductionStepsTest, CoverEveryShareInLongMessagesThatFit) {
  for (const std::uint32_t ranks : {1u, 2u, 3u, 8u, 9u, 17u, 128u, 1024u}) {
    const std::uint64_t staging = staging_bytes(ranks);
    for (const std::uint64_t element_bytes : {2u, 4u}) {
      for (const std::uint64_t share : {1u, 63u, 64u, 131'072u, 131'073u, 262'144u, 262'145u,
                                        524'289u, 5'000'001u, 7'900'000u}) {
        for (const bool overlaps : {false, true}) {
          const ReductionSteps steps =
              reduction_steps(share, element_bytes, ranks, staging, overlaps);
          SCOPED_TRACE(testing::Message() << ranks << " ranks, " << share << " elements of "
                                          << element_bytes << " bytes");
          EXPECT_LE(steps.halves, overlaps ? 2u : 1u);
          if (ranks > 1) {
            EXPECT_LE(steps.elements * element_bytes * (ranks - 1) * steps.halves, staging);
          }
          if (steps.halves == 2) {
            EXPECT_GE(steps.count, 2u);
          }
          const ElementRange all{.begin = 7, .end = 7 + share};
          std::uint64_t end = all.begin;
          for (std::uint64_t step = 0; step < steps.count; ++step) {
            const ElementRange piece = steps.piece(all, step);
            EXPECT_EQ(piece.begin, end);
            EXPECT_GE(piece.count() * element_bytes,
                      std::min<std::uint64_t>(share * element_bytes, 256_KiB));
            end = piece.end;
          }
          EXPECT_EQ(end, all.end);
        }
      }
    }
  }
}

// The example of the header.
TEST(ReductionStepsTest, ManyRanksHaveAMebibyteForEachOther) {
  EXPECT_EQ(staging_bytes(1024), 1023_MiB);
  const ReductionSteps steps = reduction_steps(1u << 23, 2, 1024, staging_bytes(1024), true);
  EXPECT_EQ(steps.count, 32u);
  EXPECT_EQ(steps.elements * 2, 512_KiB);
  EXPECT_EQ(steps.halves, 2u);
  EXPECT_EQ(staging_bytes(2), 8_MiB);
}

}  // namespace
}  // namespace sluice
