// Commits in T_bound: the bytes and flushes that they add to a step, by hand.
#include "engine/bound/bound.h"

#include <gtest/gtest.h>

#include "tests/engine/bound/bound_model.h"

namespace sluice {
namespace {

using test::kParameterBytes;
using test::kRecordBytes;

constexpr double kRate = 1e9;
constexpr double kFlush = 5e-3;
constexpr double kBlocks = 6;
constexpr double kStateS = kBlocks * (kParameterBytes + kRecordBytes) / kRate;

class CommitBound : public testing::Test {
 protected:
  CommitBound() {
    model_.rates.write_bytes_per_second = model_.rates.read_bytes_per_second = kRate;
    model_.rates.duplex = Duplex::kHalf;
    model_.set_compute(1e-7, 1e-7);
  }
  StepCost cost(OverlapPolicy policy, std::uint32_t copies, std::uint32_t commit_every = 1,
                double flush_s = kFlush) {
    model_.placement.durable_copies = copies;
    model_.rates.flush_s = flush_s;
    return bound_step({model_.layout, model_.placement, model_.schedule, model_.window,
                       model_.rates, nullptr, commit_every},
                      policy);
  }

  test::BoundModel model_{{2, 3, 1}};
};

constexpr OverlapPolicy kCommittingPolicies[] = {OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                                 OverlapPolicy::kEager,
                                                 OverlapPolicy::kSpeculative};

// The drive does nothing else, so a step takes what its share of a commit takes.
TEST_F(CommitBound, StateInMemoryIsWrittenByEachCommitAndFlushedThreeTimes) {
  model_.set_tiers(Tier::kHost, Tier::kHost);
  for (const OverlapPolicy policy : kCommittingPolicies) {
    SCOPED_TRACE(name_of(policy));
    EXPECT_LT(cost(policy, 0).step_s, 1e-5);
    for (const std::uint32_t every : {1u, 2u, 5u}) {
      const StepCost step = cost(policy, 2, every);
      EXPECT_NEAR(step.step_s, (kStateS + 3 * kFlush) / every, 2e-5) << every;
      EXPECT_NEAR(step.busy(Resource::kStorage), (kStateS + 3 * kFlush) / every, 1e-8) << every;
      EXPECT_NEAR(static_cast<double>(step.traffic.nvme_write_bytes),
                  kBlocks * (kParameterBytes + kRecordBytes) / every, 1);
    }
  }
}

// Half of it: only the records are written for commits.
TEST_F(CommitBound, OnlyWhatIsInMemoryIsWrittenOnceMore) {
  model_.set_tiers(Tier::kNvme, Tier::kHost);
  for (const OverlapPolicy policy : kCommittingPolicies) {
    const StepCost bare = cost(policy, 0);
    const StepCost step = cost(policy, 2);
    EXPECT_EQ(step.traffic.nvme_write_bytes - bare.traffic.nvme_write_bytes,
              static_cast<std::uint64_t>(kBlocks * kRecordBytes));
    EXPECT_GE(step.step_s, bare.step_s + kBlocks * kRecordBytes / kRate);
  }
}

TEST_F(CommitBound, StateOnStorageCostsItsFlushesAtMost) {
  for (const OverlapPolicy policy : kCommittingPolicies) {
    SCOPED_TRACE(name_of(policy));
    const double bare_s = cost(policy, 0).step_s;
    EXPECT_NEAR(cost(policy, 3, 1, 0).step_s, bare_s, 1e-9);
    const double step_s = cost(policy, 2).step_s;
    EXPECT_GT(step_s, bare_s);
    EXPECT_LE(step_s, bare_s + kStateS + 3 * kFlush);
    EXPECT_NEAR(cost(policy, 2).busy(Resource::kStorage),
                cost(policy, 0).busy(Resource::kStorage) + 3 * kFlush, 1e-8);
  }
}

// Under `deferred` the stores of one step follow those of the step before anyway.
TEST_F(CommitBound, FlushesHideBehindComputation) {
  model_.set_compute(0.1, 0.2);
  const double bare_s = cost(OverlapPolicy::kDeferred, 0).step_s;
  EXPECT_NEAR(cost(OverlapPolicy::kDeferred, 2).step_s, bare_s, 1e-9);
  EXPECT_GT(cost(OverlapPolicy::kDeferred, 2, 1, 1.0).step_s, 2.9);
}

// The drive has nothing else to do: what the cache holds back costs the flush as much, and a cache
// that is smaller than the state fills up before.
TEST_F(CommitBound, AFlushWritesWhatTheCacheHolds) {
  model_.set_tiers(Tier::kHost, Tier::kHost);
  for (const double cached : {0.0, 1.5, 3.0, 2 * kBlocks}) {
    model_.rates.write_cache_bytes =
        static_cast<std::uint64_t>(cached * (kParameterBytes + kRecordBytes));
    const StepCost step = cost(OverlapPolicy::kDeferred, 2);
    EXPECT_NEAR(step.step_s, kStateS + 3 * kFlush, 4e-5) << cached;
    EXPECT_NEAR(step.busy(Resource::kStorage), kStateS + 3 * kFlush, 1e-8) << cached;
  }
}

// Reads come first, and the cache is written out while the drive would be idle: with room for all
// writes of a step, the step takes no longer than its reads and its computation.
TEST_F(CommitBound, ACacheIsWrittenBesideComputation) {
  model_.set_compute(kStateS, kStateS);  // the drive is idle most of the time
  const double bare_s = cost(OverlapPolicy::kSerial, 0).step_s;
  model_.rates.write_cache_bytes = 1 << 30;
  const double cached_s = cost(OverlapPolicy::kSerial, 0).step_s;
  EXPECT_LT(cached_s, bare_s - 0.1 * kStateS);
  EXPECT_NEAR(cost(OverlapPolicy::kSerial, 0).busy(Resource::kStorage),
              2 * kStateS + kBlocks * kParameterBytes / kRate, 0.2 * kStateS);
  // A flush makes reads wait until it is written.
  EXPECT_GT(cost(OverlapPolicy::kSerial, 2).step_s, cached_s);
}

// As long as the step fetches units, the cache is written beside computation, so that the flush has
// little left to write. Otherwise half of backward would wait for it.
TEST(CommitTurnBound, TheFlushComesWhenTheCacheHasBeenWritten) {
  constexpr int kUnits = 16;
  test::BoundModel model{std::vector<int>(kUnits, 1)};
  model.set_prefetch_slots(2);
  model.rates.write_bytes_per_second = model.rates.read_bytes_per_second = kRate;
  model.rates.duplex = Duplex::kHalf;
  model.rates.write_cache_bytes = 1 << 30;
  // As long as the drive needs for the step's bytes.
  const double unit_s = (2 * (kParameterBytes + kRecordBytes) + kParameterBytes) / kRate;
  model.set_compute(unit_s / 3, 2 * unit_s / 3);
  const double bare_s = model.step_s(OverlapPolicy::kDeferred);
  model.placement.durable_copies = 2;
  EXPECT_LE(model.step_s(OverlapPolicy::kDeferred), 1.03 * bare_s);
}

// No cache, and flushes that are slow by themselves: they have room beside computation only if they
// begin at once.
TEST(CommitTurnBound, SlowFlushesBeginAtOnce) {
  test::BoundModel model{std::vector<int>(16, 1), 4};
  model.set_prefetch_slots(4);
  model.rates.write_bytes_per_second = model.rates.read_bytes_per_second = kRate;
  model.rates.duplex = Duplex::kHalf;
  const double unit_s = (2 * (kParameterBytes + kRecordBytes) + kParameterBytes) / kRate;
  model.set_compute(4 * unit_s / 3, 8 * unit_s / 3);
  const double bare_s = model.step_s(OverlapPolicy::kDeferred);
  model.placement.durable_copies = 2;
  model.rates.flush_s = 40 * unit_s / 3;  // a commit takes 40 of 64
  EXPECT_NEAR(model.step_s(OverlapPolicy::kDeferred), bare_s, 1e-3 * bare_s);
}

// Everything is stored before the next step begins, whose reads then wait for the flush.
TEST(CommitTurnBound, UnderSerialTheCommitBeginsAtOnce) {
  test::BoundModel model{std::vector<int>(16, 1), 4};
  model.rates.write_bytes_per_second = model.rates.read_bytes_per_second = kRate;
  model.rates.write_cache_bytes = 1 << 30;
  model.rates.duplex = Duplex::kHalf;
  const double unit_s = (2 * (kParameterBytes + kRecordBytes) + kParameterBytes) / kRate;
  model.set_compute(unit_s / 3, 2 * unit_s / 3);
  const double bare_s = model.step_s(OverlapPolicy::kSerial);
  model.placement.durable_copies = 2;
  EXPECT_GT(model.step_s(OverlapPolicy::kSerial), 1.1 * bare_s);
}

// The device's updates wait for the saves, too.
TEST_F(CommitBound, StateOnTheDeviceLeavesItFirst) {
  model_.set_tiers(Tier::kDevice, Tier::kDevice);
  std::ranges::fill(model_.placement.gradient_tier, Tier::kDevice);
  model_.rates.down_bytes_per_second = kRate;
  for (const OverlapPolicy policy : kCommittingPolicies) {
    SCOPED_TRACE(name_of(policy));
    const StepCost step = cost(policy, 2);
    EXPECT_NEAR(step.busy(Resource::kCopyDown), kStateS, 1e-8);
    EXPECT_GE(step.step_s, kStateS + 3 * kFlush);
    EXPECT_LE(step.step_s, 2 * kStateS + 3 * kFlush + 2e-5);
  }
}

// Commits that are rarer than the simulation looks ahead cost their share.
TEST_F(CommitBound, RareCommitsAreNotForgotten) {
  model_.set_tiers(Tier::kHost, Tier::kHost);
  EXPECT_NEAR(cost(OverlapPolicy::kDeferred, 2, 1000).step_s, (kStateS + 3 * kFlush) / 1000, 2e-5);
}

}  // namespace
}  // namespace sluice
