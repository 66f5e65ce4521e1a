#include "engine/planner/phase_memory.h"

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "engine/plan/activation_plan.h"
#include "engine/plan/sharding.h"
#include "engine/plan/window_plan.h"

namespace sluice {
namespace {

// The optimizer's phase begins while the last gradients drain; a pass that does not overlap begins
// after that.
enum Moment : std::size_t { kForward, kBackward, kDraining, kPassing };
constexpr std::size_t kMoments = 4;

class Prediction {
 public:
  explicit Prediction(const PhaseSubject& subject)
      : subject_(subject),
        layout_(subject.layout),
        placement_(subject.placement),
        schedule_(training_schedule(subject.model, subject.micro_batches, subject.order)),
        overlaps_(subject.policy != OverlapPolicy::kSerial),
        // Forward uses follow backward ones of the same step.
        turns_back_(subject.micro_batches > 1 && subject.order == MicroBatchOrder::kHorizontal) {}

  PhaseMarks marks() {
    for (const MemoryPool pool :
         {MemoryPool::kResidentParameters, MemoryPool::kHostParameters, MemoryPool::kNvmeParameters,
          MemoryPool::kDeviceRecords, MemoryPool::kHostRecords, MemoryPool::kNvmeRecords,
          MemoryPool::kDeviceTallies, MemoryPool::kHostTallies, MemoryPool::kActivationWindow,
          MemoryPool::kHostActivations})
      always(pool, capacity_of(placement_, pool));
    add_window();
    add_gradients();
    add_pass();
    add_activations();
    raise_marks(marks_[kPassing], marks_[kDraining]);
    return {marks_[kForward], marks_[kBackward], marks_[kPassing]};
  }

 private:
  void in(Moment moment, MemoryPool pool, std::uint64_t size_bytes) {
    marks_[moment].add(pool, size_bytes);
  }
  void always(MemoryPool pool, std::uint64_t size_bytes) {
    for (const Moment moment : {kForward, kBackward, kDraining, kPassing})
      in(moment, pool, size_bytes);
  }

  // A unit's bytes stay until others overwrite them; the last ones stay until the next step.
  void add_window() {
    const std::vector<std::uint64_t> sizes = window_unit_bytes(layout_, placement_);
    const WindowPlan plan =
        plan_window(schedule_, sizes, placement_.window_bytes, subject_.model.concurrent_leases);
    struct Range {
      std::uint64_t begin = 0;
      std::uint64_t end = 0;
    };
    std::vector<Range> ranges;
    std::uint64_t bytes = 0;
    std::uint64_t most_bytes = 0;
    for (std::size_t use = 0; use < schedule_.size(); ++use) {
      if (!plan.uses[use].fetch) continue;
      const std::uint64_t begin = plan.uses[use].offset_bytes;
      const Range own{begin, begin + sizes[index_of(schedule_[use].unit)]};
      std::erase_if(ranges, [&](const Range& other) {
        return own.begin < other.end && other.begin < own.end;
      });
      ranges.push_back(own);
      bytes = 0;
      for (const Range& range : ranges) bytes += range.end - range.begin;
      most_bytes = std::max(most_bytes, bytes);
    }
    in(kForward, MemoryPool::kWindow, most_bytes);
    in(kBackward, MemoryPool::kWindow, most_bytes);
    in(kDraining, MemoryPool::kWindow, bytes);
    in(kPassing, MemoryPool::kWindow, bytes);
  }

  // They come in backward and wait until the update has used them: into the next forward, if the
  // update overlaps with it. The set keeps other ranks' parts until the last reduction.
  void add_gradients() {
    const bool keeps_others =
        subject_.ranks > 1 &&
        !reduces_each_use(layout_.shard(), subject_.micro_batches, subject_.order);
    std::vector<std::pair<std::uint64_t, MemoryPool>> others;
    for (const UnitPlace& unit : layout_.units()) {
      if (unit.is_frozen) continue;
      const MemoryPool pool = gradient_pool(unit.id);
      const std::uint64_t bytes = gradient_bytes(unit, pool);
      for (const Moment moment : {kBackward, kDraining, kPassing}) in(moment, pool, bytes);
      if (overlaps_ || turns_back_) in(kForward, pool, bytes);
      if (!keeps_others) continue;
      others.emplace_back(
          (layout_.set_elements(unit.id) - unit.shard_elements) * layout_.format().gradient_bytes(),
          pool);
      in(kBackward, pool, others.back().first);
      if (turns_back_) in(kForward, pool, others.back().first);
    }
    std::ranges::sort(others, std::greater());
    others.resize(std::min<std::size_t>(others.size(), placement_.gradient_slots.count));
    for (const auto& [bytes, pool] : others) in(kDraining, pool, bytes);
    add_drain();
  }

  MemoryPool gradient_pool(UnitId unit) const {
    if (placement_.gradient_spills(unit)) return MemoryPool::kNvmeGradients;
    return placement_.gradient_is_on_device(unit) ? MemoryPool::kDeviceGradients
                                                  : MemoryPool::kHostGradients;
  }

  // The bytes of the part that this rank owns.
  std::uint64_t gradient_bytes(const UnitPlace& unit, MemoryPool pool) const {
    if (pool != MemoryPool::kNvmeGradients)
      return unit.shard_elements * layout_.format().gradient_bytes();
    std::uint64_t bytes = 0;
    for (const BlockPlace& block : layout_.blocks_of(unit.id))
      bytes += layout_.gradient_slot_bytes(block.id);
    return bytes;
  }

  void add_drain() {
    const auto& backward = subject_.model.backward_order;
    std::vector<UnitId> units(backward);
    std::ranges::sort(units, {}, [](UnitId unit) { return index_of(unit); });
    const bool repeats = std::ranges::adjacent_find(units) != units.end();
    const bool stages = subject_.micro_batches > 1 || repeats ||
                        std::ranges::count(placement_.gradient_tier, Tier::kNvme) != 0;
    const SlotPool& slots = placement_.gradient_slots;
    std::uint64_t uses = backward.size() * subject_.micro_batches;
    if (placement_.leases_gradient_set) {  // the first ones take no slot
      const auto end = std::unique(units.begin(), units.end());
      uses -= static_cast<std::uint64_t>(std::count_if(
          units.begin(), end, [this](UnitId unit) { return !placement_.gradient_leaves(unit); }));
    }
    const std::uint64_t slot_bytes = std::min<std::uint64_t>(slots.count, uses) * slots.slot_bytes;
    const std::uint64_t staging_bytes = stages ? placement_.gradient_staging.size_bytes() : 0;
    for (const Moment moment : {kForward, kBackward, kDraining}) {
      if (moment == kForward && !turns_back_) continue;
      in(moment, MemoryPool::kGradientSlots, slot_bytes);
      in(moment, MemoryPool::kGradientStaging, staging_bytes);
    }
  }

  // Lanes and slots, with a block in each.
  void add_pass() {
    std::uint32_t in_lanes = 0;
    std::uint32_t in_slots = 0;
    std::uint64_t shadow_bytes = 0;  // of the largest block
    for (const BlockPlace& block : layout_.blocks()) {
      const Tier parameters = placement_.parameter_tier[index_of(block.id)];
      const Tier record = placement_.record_tier[index_of(block.id)];
      const bool is_at_hand = !placement_.update_takes_slot(block.id);
      if (parameters == Tier::kNvme || (!is_at_hand && record != Tier::kDevice)) ++in_slots;
      const bool stays =
          is_at_hand && record == Tier::kHost && !placement_.lane_fetches_gradients(block.unit);
      if (!layout_.is_frozen(block.id) && record != Tier::kDevice && !stays) ++in_lanes;
      if (placement_.has_shadow(block.id))
        shadow_bytes = std::max(shadow_bytes, layout_.parameter_slot_bytes(block.id) +
                                                  layout_.record_slot_bytes(block.id));
    }
    const std::uint32_t lanes = std::min(placement_.lanes.count, in_lanes);
    const std::uint64_t lane_bytes =
        lanes * (placement_.lanes.slot_bytes + placement_.lane_gradients.slot_bytes);
    const SlotPool& slots = placement_.parameter_slots;
    const std::uint64_t slot_bytes = std::min(slots.count, in_slots) * slots.slot_bytes;
    // A lane's slot is reserved for it.
    const std::uint32_t others = slots.count - std::min(slots.count, placement_.lanes.count);
    for (const Moment moment : {kForward, kBackward, kDraining}) {
      in(moment, MemoryPool::kLanes, overlaps_ ? lane_bytes : 0);
      in(moment, MemoryPool::kParameterSlots,
         overlaps_ ? slot_bytes : std::min(others, in_slots) * slots.slot_bytes);
    }
    in(kPassing, MemoryPool::kLanes, lane_bytes);
    in(kPassing, MemoryPool::kParameterSlots,
       overlaps_ ? slot_bytes : std::min(slots.count, lanes) * slots.slot_bytes);
    if (subject_.policy != OverlapPolicy::kSpeculative) return;
    for (const Moment moment : {kBackward, kDraining, kPassing})
      in(moment, MemoryPool::kShadows, placement_.shadow_bytes);
    // During the next forward: the shadows of lanes that still write.
    in(kForward, MemoryPool::kShadows, std::min(placement_.shadow_bytes, lanes * shadow_bytes));
  }

  void add_activations() {
    for (const Moment moment : {kForward, kBackward, kDraining})
      in(moment, MemoryPool::kActivationStaging, placement_.activation_staging.size_bytes());
    if (placement_.nvme_activation_bytes == 0) return;
    const std::uint64_t most_bytes = plan_activations({.model = subject_.model,
                                                       .micro_batches = subject_.micro_batches,
                                                       .order = subject_.order},
                                                      placement_.activation_window.count)
                                         .at_home_most_bytes;
    in(kForward, MemoryPool::kNvmeActivations, most_bytes);
    in(kBackward, MemoryPool::kNvmeActivations, most_bytes);
  }

  const PhaseSubject& subject_;
  const Layout& layout_;
  const Placement& placement_;
  const Schedule schedule_;
  const bool overlaps_;
  const bool turns_back_;
  std::array<PoolMarks, kMoments> marks_;  // by Moment
};

}  // namespace

PhaseMarks predicted_marks(const PhaseSubject& subject) {
  return Prediction(subject).marks();
}

}  // namespace sluice
