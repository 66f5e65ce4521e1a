// Which block of an update comes next, and whether it may be updated, by hand for every policy:
// engine/flow/update_order.h word by word, without threads, lanes or bytes.
#include "engine/flow/update_order.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "tests/engine/bound/bound_model.h"

namespace sluice::test {
namespace {

using Blocks = std::vector<std::uint32_t>;

constexpr UnitId kFirst{0};   // blocks 0 and 1
constexpr UnitId kSecond{1};  // block 2
constexpr UnitId kThird{2};   // blocks 3, 4 and 5

class UpdateOrderTest : public testing::Test {
 protected:
  void make() {
    order_ =
        std::make_unique<UpdateOrder>(model_.layout, model_.placement, forward_order_, untouched_);
  }
  void begin(OverlapPolicy policy) {
    if (!order_) make();
    order_->announce({.policy = policy, .version = version_++, .coefficients = {}});
    order_->begin_announced();
  }
  void fetched(std::initializer_list<UnitId> units) {
    for (const UnitId unit : units) order_->fetched(unit);
  }
  void set_tiers(UnitId unit, Tier parameters, Tier record) {
    for (const BlockPlace& block : model_.layout.blocks_of(unit)) {
      model_.placement.parameter_tier[index_of(block.id)] = parameters;
      model_.placement.record_tier[index_of(block.id)] = record;
    }
  }
  // Starts so many of the blocks that may start now.
  Blocks start(std::size_t count = 100, UpdatePlace place = UpdatePlace::kLane) {
    Blocks started;
    while (started.size() < count && order_->next(place)) {
      started.push_back(index_of(*order_->next(place)));
      order_->take_next(place);
    }
    return started;
  }
  Blocks start(UpdatePlace place) { return start(100, place); }
  // Those that may be updated now.
  Blocks updatable() const {
    Blocks blocks;
    for (const BlockPlace& block : model_.layout.blocks())
      if (order_->may_update(block.id)) blocks.push_back(index_of(block.id));
    return blocks;
  }
  bool update(std::uint32_t block) {
    return order_->count_updated(model_.layout.block(BlockId{block}));
  }
  void update_all(const Blocks& blocks) {
    for (const std::uint32_t block : blocks) update(block);
  }

  BoundModel model_{{2, 1, 3}};
  // The third unit, the first one, and last the second, which is not named.
  std::vector<UnitId> forward_order_{kThird, kFirst};
  UntouchedPolicy untouched_ = UntouchedPolicy::kUpdate;
  std::unique_ptr<UpdateOrder> order_;
  std::uint64_t version_ = 0;
};

const Blocks kForward{3, 4, 5, 0, 1, 2};
const Blocks kEvery{0, 1, 2, 3, 4, 5};

TEST_F(UpdateOrderTest, RanksAreThoseOfTheNextForward) {
  make();
  for (std::uint32_t rank = 0; rank < kForward.size(); ++rank)
    EXPECT_EQ(order_->rank(BlockId{kForward[rank]}), rank);
}

TEST_F(UpdateOrderTest, SerialStartsNothingBeforeTheCoefficients) {
  begin(OverlapPolicy::kSerial);
  fetched({kThird, kSecond, kFirst});
  order_->gradient_is_final(kThird);
  EXPECT_EQ(start(), Blocks());
  EXPECT_EQ(updatable(), Blocks());
  order_->apply({});
  EXPECT_EQ(updatable(), kEvery);
  EXPECT_EQ(start(), kForward);
}

TEST_F(UpdateOrderTest, DeferredReadsAheadInForwardOrderAndUpdatesWithTheCoefficients) {
  begin(OverlapPolicy::kDeferred);
  EXPECT_EQ(start(2), Blocks({3, 4}));
  fetched({kSecond, kFirst});
  order_->gradient_is_final(kThird);
  EXPECT_EQ(updatable(), Blocks());
  EXPECT_EQ(start(1), Blocks({5}));
  order_->apply({});
  EXPECT_EQ(updatable(), kEvery);
  EXPECT_EQ(start(), Blocks({0, 1, 2}));
}

TEST_F(UpdateOrderTest, EagerStartsWhatIsFetchedAndUpdatesWhatIsFinal) {
  begin(OverlapPolicy::kEager);
  EXPECT_EQ(start(), Blocks());
  fetched({kSecond, kFirst});
  EXPECT_EQ(updatable(), Blocks());
  order_->gradient_is_final(kFirst);
  EXPECT_EQ(updatable(), Blocks({0, 1}));
  EXPECT_EQ(start(2), Blocks({2, 0}));
  fetched({kThird});
  EXPECT_EQ(start(2), Blocks({1, 3}));
  EXPECT_FALSE(order_->updates_are_tentative());
  order_->apply({});
  EXPECT_EQ(updatable(), kEvery);
  EXPECT_EQ(start(), Blocks({4, 5}));
}

// From the coefficients on the next forward's order counts, not that of backward.
TEST_F(UpdateOrderTest, EagerGoesOnInForwardOrder) {
  begin(OverlapPolicy::kEager);
  fetched({kSecond, kFirst, kThird});
  EXPECT_EQ(start(1), Blocks({2}));
  order_->apply({});
  EXPECT_EQ(start(), Blocks({3, 4, 5, 0, 1}));
}

TEST_F(UpdateOrderTest, SpeculativeIsEarlyWhereThereIsAShadow) {
  model_.placement.storage_copies = 2;
  model_.placement.record_tier[1] = Tier::kHost;  // half of the first unit
  begin(OverlapPolicy::kSpeculative);
  EXPECT_TRUE(order_->updates_are_tentative());
  fetched({kFirst, kSecond, kThird});
  EXPECT_EQ(start(), Blocks({0, 2, 3, 4, 5}));
  order_->gradient_is_final(kThird);
  EXPECT_EQ(updatable(), Blocks({3, 4, 5}));
  order_->apply({});
  EXPECT_FALSE(order_->updates_are_tentative());
  EXPECT_EQ(start(), Blocks({1}));
}

// A block at rest with a tentative update starts again if it waits for another start.
TEST_F(UpdateOrderTest, TentativeBlocksStartAgainOnlyWhenTheyHaveTo) {
  model_.placement.storage_copies = 2;
  begin(OverlapPolicy::kSpeculative);
  fetched({kSecond, kFirst});
  EXPECT_EQ(start(), Blocks({2, 0, 1}));
  for (const std::uint32_t block : {2u, 0u, 1u}) order_->set_tentative(BlockId{block});
  EXPECT_TRUE(order_->is_tentative(BlockId{0}));
  order_->set_waiting(BlockId{0});
  order_->set_waiting(BlockId{2});
  order_->apply({});
  EXPECT_EQ(start(), Blocks({3, 4, 5, 0, 2}));
}

// A gradient that would be read twice, should the update be made again, waits.
TEST_F(UpdateOrderTest, SpeculativeReadsAGradientThatLeavesOnlyOnce) {
  model_.placement.storage_copies = 2;
  for (const Tier tier : {Tier::kNvme, Tier::kDevice}) {
    model_.placement.gradient_tier[index_of(kSecond)] = tier;
    make();
    begin(OverlapPolicy::kSpeculative);
    fetched({kSecond, kFirst, kThird});
    EXPECT_EQ(start(), Blocks({0, 1, 3, 4, 5}));
    order_->apply({});
    EXPECT_EQ(start(), Blocks({2}));
  }
}

// An eager update is never made again.
TEST_F(UpdateOrderTest, EagerReadsAGradientThatLeavesEarly) {
  model_.placement.gradient_tier[index_of(kSecond)] = Tier::kNvme;
  begin(OverlapPolicy::kEager);
  fetched({kSecond});
  EXPECT_EQ(start(), Blocks({2}));
}

TEST_F(UpdateOrderTest, WithoutShadowsSpeculativeWaitsForTheCoefficients) {
  begin(OverlapPolicy::kSpeculative);
  fetched({kThird, kSecond, kFirst});
  EXPECT_EQ(start(), Blocks());
  order_->apply({});
  EXPECT_EQ(start(), kForward);
}

// A block at home where it is updated has nothing to be read ahead: it starts when it may be
// updated, and each place has an order of its own.
TEST_F(UpdateOrderTest, EachPlaceHasAnOrderOfItsOwn) {
  set_tiers(kFirst, Tier::kHost, Tier::kHost);
  set_tiers(kThird, Tier::kDevice, Tier::kDevice);
  for (const OverlapPolicy policy :
       {OverlapPolicy::kSerial, OverlapPolicy::kDeferred, OverlapPolicy::kEager}) {
    make();
    begin(policy);
    fetched({kThird, kSecond, kFirst});
    EXPECT_EQ(start(UpdatePlace::kInPlace), Blocks());
    EXPECT_EQ(start(UpdatePlace::kDevice), Blocks());
    EXPECT_EQ(start(), policy == OverlapPolicy::kSerial ? Blocks() : Blocks({2}));
    order_->gradient_is_final(kThird);
    const bool is_eager = policy == OverlapPolicy::kEager;
    EXPECT_EQ(start(1, UpdatePlace::kDevice), is_eager ? Blocks({3}) : Blocks());
    EXPECT_EQ(start(UpdatePlace::kInPlace), Blocks());
    order_->apply({});
    EXPECT_EQ(start(UpdatePlace::kDevice), is_eager ? Blocks({4, 5}) : Blocks({3, 4, 5}));
    EXPECT_EQ(start(UpdatePlace::kInPlace), Blocks({0, 1}));
    EXPECT_EQ(start(), policy == OverlapPolicy::kSerial ? Blocks({2}) : Blocks());
  }
}

// A block at home in host memory needs its gradient brought if that waits elsewhere.
TEST_F(UpdateOrderTest, AGradientElsewhereWantsALane) {
  set_tiers(kFirst, Tier::kHost, Tier::kHost);
  model_.placement.gradient_tier[index_of(kFirst)] = Tier::kNvme;
  begin(OverlapPolicy::kDeferred);
  EXPECT_EQ(start(UpdatePlace::kInPlace), Blocks());
  EXPECT_EQ(start(), kForward);
}

// An update is announced while the one before is being applied, and begins when that has ended;
// what has been fetched by then starts in the order in which it was.
TEST_F(UpdateOrderTest, TheNextUpdateBeginsWhenTheOneBeforeHasEnded) {
  begin(OverlapPolicy::kEager);
  order_->gradient_is_final(kThird);
  order_->apply({});
  fetched({kSecond});  // a unit that needs no copies may be ready before the announcement
  order_->announce({.policy = OverlapPolicy::kEager, .version = 1, .coefficients = {}});
  fetched({kThird});
  EXPECT_FALSE(order_->may_begin());
  EXPECT_FALSE(order_->is_begun());
  EXPECT_EQ(order_->current().version, 0u);
  EXPECT_EQ(start(), kForward);
  update_all({3, 4, 5, 0});
  EXPECT_FALSE(update(1) && order_->may_begin()) << "the first unit is whole, the update is not";
  EXPECT_EQ(order_->phase(), UpdateOrder::Phase::kApplying);
  EXPECT_TRUE(update(2));
  EXPECT_EQ(order_->phase(), UpdateOrder::Phase::kIdle);
  EXPECT_EQ(order_->updated_count(), 6u);
  ASSERT_TRUE(order_->may_begin());
  order_->begin_announced();
  EXPECT_TRUE(order_->is_begun());
  EXPECT_EQ(order_->updated_count(), 0u);
  EXPECT_EQ(updatable(), Blocks()) << "gradients of the step before are not this step's";
  EXPECT_EQ(start(), Blocks({2, 3, 4, 5}));
}

TEST_F(UpdateOrderTest, AUnitIsWholeWithItsLastBlock) {
  begin(OverlapPolicy::kSerial);
  order_->apply({});
  EXPECT_FALSE(update(4));
  EXPECT_FALSE(update(0));
  EXPECT_TRUE(update(2));
  EXPECT_FALSE(update(3));
  EXPECT_TRUE(update(5));
  EXPECT_TRUE(update(1));
}

TEST_F(UpdateOrderTest, CancelForgetsWhatIsNotApplied) {
  begin(OverlapPolicy::kDeferred);
  EXPECT_EQ(start(1), Blocks({3}));
  EXPECT_TRUE(order_->cancel()) << "it had begun";
  EXPECT_EQ(order_->phase(), UpdateOrder::Phase::kIdle);
  EXPECT_EQ(start(), Blocks());
  begin(OverlapPolicy::kDeferred);
  EXPECT_EQ(start(), kForward) << "from the beginning";
  order_->apply({});
  order_->announce({.policy = OverlapPolicy::kDeferred, .version = 9, .coefficients = {}});
  EXPECT_FALSE(order_->cancel()) << "what is being applied stays";
  EXPECT_EQ(order_->phase(), UpdateOrder::Phase::kApplying);
  update_all(kEvery);
  EXPECT_FALSE(order_->may_begin());
}

// Nothing of a unit is read ahead before the unit has a gradient, and units without one are done
// when the others are.
TEST_F(UpdateOrderTest, UnitsWithoutGradientStayIfTheyMay) {
  untouched_ = UntouchedPolicy::kSkip;
  begin(OverlapPolicy::kDeferred);
  fetched({kThird});
  EXPECT_EQ(start(), Blocks());
  order_->touched(kSecond);
  EXPECT_EQ(start(), Blocks({2}));
  order_->touched(kThird);
  order_->touched(kSecond);
  fetched({kSecond});
  EXPECT_EQ(start(2), Blocks({3, 4}));
  EXPECT_TRUE(order_->stays(kFirst));
  order_->apply({});
  EXPECT_EQ(start(), Blocks({5}));
  order_->announce({.policy = OverlapPolicy::kSerial, .version = 1, .coefficients = {}});
  update_all({2, 3, 4});
  EXPECT_FALSE(order_->may_begin());
  EXPECT_TRUE(update(5));
  EXPECT_EQ(order_->updated_count(), 6u);
  ASSERT_TRUE(order_->may_begin());
  order_->begin_announced();
  EXPECT_TRUE(order_->stays(kSecond)) << "gradients of the step before are not this step's";
  order_->touched(kFirst);
  EXPECT_EQ(start(), Blocks());
  order_->apply({});
  EXPECT_EQ(start(), Blocks({0, 1}));
}

TEST_F(UpdateOrderTest, EarlyUpdatesWaitForTheFirstGradientIfUnitsMayStay) {
  untouched_ = UntouchedPolicy::kSkip;
  begin(OverlapPolicy::kEager);
  order_->touched(kSecond);
  EXPECT_EQ(start(), Blocks());
  fetched({kFirst, kSecond});
  EXPECT_EQ(start(), Blocks({2})) << "once it is fetched, too";
  order_->touched(kFirst);
  EXPECT_EQ(start(1), Blocks({0}));
  order_->touched(kThird);  // announced: not fetched as part of the schedule
  EXPECT_EQ(start(), Blocks({1}));
  order_->gradient_is_final(kFirst);
  EXPECT_EQ(updatable(), Blocks({0, 1}));
  order_->apply({});
  EXPECT_EQ(start(), Blocks({3, 4, 5}));
}

// Without a gradient anywhere, the update ends where it begins.
TEST_F(UpdateOrderTest, AnUpdateOfNothingEndsAtOnce) {
  untouched_ = UntouchedPolicy::kSkip;
  begin(OverlapPolicy::kSerial);
  order_->apply({});
  EXPECT_EQ(start(), Blocks());
  EXPECT_EQ(order_->phase(), UpdateOrder::Phase::kIdle);
}

TEST(UpdateOrderOfFrozenUnits, TheyHaveNoPart) {
  BoundModel model({1, 2, 1});
  model.spec.units[1].is_frozen = true;
  const Layout layout(model.spec, {}, kBlockElements);
  const std::vector<UnitId> forward_order{UnitId{0}, UnitId{1}, UnitId{2}};
  UpdateOrder order(layout, model.placement, forward_order);
  order.announce({.policy = OverlapPolicy::kSerial, .version = 0, .coefficients = {}});
  order.begin_announced();
  order.apply({});
  for (const std::uint32_t block : {0u, 3u}) {
    EXPECT_EQ(order.next(UpdatePlace::kLane), BlockId{block});
    order.take_next(UpdatePlace::kLane);
    EXPECT_TRUE(order.count_updated(layout.block(BlockId{block})));
  }
  EXPECT_EQ(order.next(UpdatePlace::kLane), std::nullopt);
  EXPECT_EQ(order.phase(), UpdateOrder::Phase::kIdle);
}

}  // namespace
}  // namespace sluice::test
