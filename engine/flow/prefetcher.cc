#include "engine/flow/prefetcher.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include <sluice/error.h>
#include "base/trace/trace_recorder.h"

namespace sluice {
namespace {

// Bounds the blocks in the pipeline that need no staging slot.
constexpr std::size_t kPipelineItemsMax = 256;

}  // namespace

Prefetcher::Prefetcher(const FlowParts& parts, ParameterSlots& slots,
                       const ResidentUnits& residents, const Target& target, Hooks hooks)
    : layout_(parts.layout),
      placement_(parts.placement),
      tiers_(parts.tiers),
      slots_(slots),
      store_(parts.store),
      residents_(residents),
      device_(parts.device),
      scheduler_(parts.scheduler),
      versions_(parts.versions),
      target_(target),
      is_gathering_(parts.ranks.shard_parameters() && target.gathers != nullptr),
      hooks_(std::move(hooks)),
      gathered_event_(parts.device),
      resident_since_ns_(parts.layout.units().size()),
      gather_stream_(parts.device, "gathers", StreamPriority::kHigh),
      copy_stream_(parts.device, "copy up", StreamPriority::kHigh),
      copy_runs_(parts.device, copy_stream_.id()) {
  for (std::size_t unit = 0; unit < parts.layout.units().size(); ++unit) {
    ready_events_.emplace_back(parts.device);
    release_events_.emplace_back(parts.device);
    if (is_gathering_) shard_events_.emplace_back(parts.device);
  }
}

void Prefetcher::begin(const Schedule& schedule, const WindowPlan& plan, std::uint64_t version,
                       bool keeps_for_update) {
  SLUICE_CHECK(idle(), "a schedule begins when the one before it has ended");
  for (std::uint32_t unit = 0; unit < resident_since_ns_.size(); ++unit)
    trace_eviction(unit, trace_now_ns());
  vacate(0, UINT64_MAX);
  await_gathers();
  schedule_ = &schedule;
  plan_ = &plan;
  version_ = version;
  keeps_for_update_ = keeps_for_update;
  next_use_ = 0;
  next_block_ = 0;
  ready_uses_ = 0;
  is_stopped_ = false;
  stop_before_ = kNever;
  released_.assign(schedule.size(), false);
  for (BeginTime& begun_ns : gathers_begun_ns_) begun_ns = 0;
  hooks_.on_change();
}

void Prefetcher::stop() {
  is_stopped_ = true;
}

void Prefetcher::fetch_up_to(std::uint32_t end) {
  SLUICE_CHECK(is_stopped_ && next_use_ + (next_block_ == 0 ? 0u : 1u) <= end,
               "fetches go on to a use that is ahead");
  is_stopped_ = next_use_ == end;
  stop_before_ = end;
  hooks_.on_change();
}

void Prefetcher::resume(const Schedule& schedule, const WindowPlan& plan, std::uint32_t acquired) {
  SLUICE_CHECK(is_stopped_ && idle(), "a schedule changes when nothing is under way");
  await_gathers();
  schedule_ = &schedule;
  plan_ = &plan;
  next_use_ = ready_uses_ = acquired;
  next_block_ = 0;
  is_stopped_ = false;
  stop_before_ = kNever;
  released_.resize(schedule.size());
  hooks_.on_change();
}

void Prefetcher::go_on() {
  is_stopped_ = false;
  stop_before_ = kNever;
  hooks_.on_change();
}

void Prefetcher::follow_longer() {
  released_.resize(schedule_->size());
  hooks_.on_change();
}

// Makes later copies wait for gathers of units that no use has waited for: those were fetched ahead
// of a change, and have no lease whose end would open their place.
void Prefetcher::await_gathers() {
  if (!is_gathering_) return;
  device_.record(gathered_event_.id(), gather_stream_.id());
  device_.wait(copy_stream_.id(), gathered_event_.id());
}

void Prefetcher::release(std::uint32_t use) {
  released_[use] = true;
  hooks_.on_change();
}

void Prefetcher::pump() {
  process_head();
  while (!is_stopped_ && !scheduler_.failed() && issue_next()) process_head();
  request_notice();
}

// Issues the next block, or the next use without blocks. Returns false if that has to wait.
bool Prefetcher::issue_next() {
  blocked_ = {};
  if (next_use_ == schedule_->size() || pipeline_.size() == kPipelineItemsMax) return false;
  const std::uint32_t use = next_use_;
  if (next_block_ == 0 && !may_start(use)) return false;
  const UnitId unit = (*schedule_)[use].unit;
  if (!plan_->uses[use].fetch || placement_.is_homed_on_device(layout_.unit(unit))) {
    pipeline_.push_back({.use = use, .is_first = true, .is_last = true});
    if (plan_->uses[use].fetch) occupy(use);
    finish_issue(use);
    return true;
  }
  const auto blocks = layout_.blocks_of(unit);
  const BlockPlace& block = blocks[next_block_];
  if (!is_updated(block)) return blocked_by(TraceReason::kUpdate, block.unit, index_of(block.id));
  const bool is_last = next_block_ + 1 == blocks.size();
  if (!issue_block(use, block, next_block_ == 0, is_last)) return false;
  if (next_block_ == 0) occupy(use);
  ++next_block_;
  if (is_last) finish_issue(use);
  return true;
}

// The bytes that the unit overwrites are lost.
void Prefetcher::occupy(std::uint32_t use) {
  const std::uint64_t begin = plan_->uses[use].offset_bytes;
  const std::uint64_t end = begin + layout_.unit_parameter_bytes((*schedule_)[use].unit);
  if (begin == end) return;
  vacate(begin, end);
  occupied_.emplace(begin, end);
  scheduler_.pools().lend(MemoryPool::kWindow, end - begin);
}

void Prefetcher::vacate(std::uint64_t begin, std::uint64_t end) {
  auto place = occupied_.upper_bound(begin);
  if (place != occupied_.begin() && std::prev(place)->second > begin) --place;
  while (place != occupied_.end() && place->first < end) {
    scheduler_.pools().take_back(MemoryPool::kWindow, place->second - place->first);
    place = occupied_.erase(place);
  }
}

void Prefetcher::finish_issue(std::uint32_t use) {
  ++next_use_;
  next_block_ = 0;
  if (next_use_ == stop_before_) is_stopped_ = true;
  if ((*schedule_)[use].final_gradient) hooks_.on_final_fetch((*schedule_)[use].unit);
}

// Whether the bytes that the use overwrites are free and, for a unit that is not copied block by
// block, whether it has been updated.
bool Prefetcher::may_start(std::uint32_t use) {
  for (const std::uint32_t evicted : plan_->uses[use].evicted_uses) {
    if (!released_[evicted]) return blocked_by(TraceReason::kWindow, (*schedule_)[use].unit);
  }
  const UnitPlace& unit = layout_.unit((*schedule_)[use].unit);
  if (!placement_.is_homed_on_device(unit) && !placement_.is_leased_at_home(unit)) return true;
  for (const BlockPlace& block : layout_.blocks_of(unit.id)) {
    if (!is_updated(block)) return blocked_by(TraceReason::kUpdate, unit.id, index_of(block.id));
  }
  return true;
}

bool Prefetcher::is_updated(const BlockPlace& block) const {
  const auto slot = slots_.find(block.id);
  if (slot && slots_.holds(*slot, version_of(block.id))) return true;
  return store_.version(block.id, Plane::kParameter) == version_of(block.id) &&
         !store_.is_storing(block.id, Plane::kParameter);
}

bool Prefetcher::issue_block(std::uint32_t use, const BlockPlace& block, bool is_first,
                             bool is_last) {
  Item item{.use = use, .block = index_of(block.id), .is_first = is_first, .is_last = is_last};
  const auto lacks_slot = [&] {
    return blocked_by(TraceReason::kSlot, block.unit, index_of(block.id));
  };
  if (placement_.parameter_tier[index_of(block.id)] == Tier::kNvme) {
    if (const auto bound = slots_.find(block.id)) {
      // Without kept slots, as under the serial policy, traffic is as predicted, to the byte: the
      // block's earlier fetch ends first.
      if (placement_.kept_slots == 0 && !slots_.is_in_pass(*bound)) return lacks_slot();
      // A cancelled update has made these bytes useless: the pass releases them soon.
      if (!slots_.will_hold(*bound, version_of(block.id))) return lacks_slot();
      item.slot = *bound;
      slots_.join(*bound, SlotUser::kPrefetch);
    } else {
      const auto taken = slots_.take(block.id, SlotUser::kPrefetch);
      if (!taken) return lacks_slot();
      item.slot = *taken;
      slots_.fetch(*taken, version_of(block.id), version_ + 1);
    }
  }
  pipeline_.push_back(item);
  return true;
}

bool Prefetcher::blocked_by(TraceReason reason, UnitId unit, std::uint32_t block) {
  blocked_ = {.reason = reason, .unit = index_of(unit), .block = block};
  return false;
}

WaitCause Prefetcher::waits_for() const {
  if (!gathers_.empty())
    return {.reason = TraceReason::kCollective,
            .unit = index_of((*schedule_)[gathers_.front()].unit)};
  if (pipeline_.empty()) return blocked_;
  const std::uint32_t block = pipeline_.front().block;
  return {.reason = TraceReason::kRead,
          .unit = index_of((*schedule_)[pipeline_.front().use].unit),
          .block = block};
}

// Queues the copies of blocks that have arrived at the front, in schedule order.
void Prefetcher::process_head() {
  take_arrived();
  // The next blocks may come late; the copies of homes in host memory wait for their unit's last.
  if (unnoticed_slot_bytes_ != 0) copy_runs_.flush();
}

void Prefetcher::take_arrived() {
  while (!pipeline_.empty()) {
    const Item item = pipeline_.front();
    const bool has_arrived =
        item.slot == kNoSlot || slots_.holds(item.slot, version_of(BlockId{item.block}));
    const bool is_void = scheduler_.failed();  // its bytes may be invalid
    if (!has_arrived && (!is_void || slots_.is_transferring(item.slot))) return;
    pipeline_.pop_front();
    if (is_void) {
      if (item.slot != kNoSlot) slots_.leave(item.slot, SlotUser::kPrefetch, /*keep=*/false);
      continue;
    }
    if (item.block != kNoBlock) copy_block(item, layout_.block(BlockId{item.block}));
    if (!item.is_last) continue;
    if (item.block != kNoBlock) {
      complete_unit(item.use);
    } else if (plan_->uses[item.use].fetch) {
      gather_from_home(item.use);
    }
    ready_uses_ = item.use + 1;
  }
}

// The copies of the use's blocks have been queued. Brings the other ranks' shards, if any, on a
// separate stream, so that copies for later uses continue meanwhile.
void Prefetcher::complete_unit(std::uint32_t use) {
  const UnitPlace& unit = layout_.unit((*schedule_)[use].unit);
  copy_runs_.flush();
  if (!is_gathering_) {
    device_.record(ready_event(unit.id), copy_stream_.id());
    return;
  }
  const EventId copied = shard_events_[index_of(unit.id)].id();
  device_.record(copied, copy_stream_.id());
  gather(use,
         target_.window + plan_->uses[use].offset_bytes +
             unit.shard_begin * layout_.format().parameter_bytes(),
         {copied}, {});
}

// The rank's shard has been updated in its home. The next update overwrites it only after the
// gradients that computation makes from this gather.
void Prefetcher::gather_from_home(std::uint32_t use) {
  const UnitPlace& unit = layout_.unit((*schedule_)[use].unit);
  copy_runs_.flush();
  std::vector<std::uint32_t> evicted_units;
  std::vector<EventId> events = {residents_.event(unit.id)};
  for (const std::uint32_t evicted : plan_->uses[use].evicted_uses) {
    const UnitId evicted_unit = (*schedule_)[evicted].unit;
    events.push_back(release_event(evicted_unit));
    // The next copy may take the rest of that unit's place, or the place that this one leaves, and
    // would otherwise wait for neither.
    device_.wait(copy_stream_.id(), release_event(evicted_unit));
    evicted_units.push_back(index_of(evicted_unit));
  }
  ++home_gathers_;
  const auto end = [this, use, evicted_units, unit = index_of(unit.id)] {
    for (const std::uint32_t evicted : evicted_units)
      trace_eviction(evicted, gathers_begun_ns_[use]);
    resident_since_ns_[unit] = trace_now_ns();
    trace_begin(resident(unit, resident_since_ns_[unit]));
    --home_gathers_;
    hooks_.on_change();
  };
  gather(use, tiers_.device_parameters(layout_.blocks_of(unit.id).front()), events,
         [this, end] { scheduler_.post(end); });
}

// Gathers all ranks' shards of the use's unit into its place, behind `events`. `source` is this
// rank's shard. The device calls `on_end`, if given, when all of it has come. The events may be
// recorded again only for work behind the use, which waits until the gather has been queued.
void Prefetcher::gather(std::uint32_t use, const std::byte* source,
                        const std::vector<EventId>& events, const std::function<void()>& on_end) {
  const UnitPlace& unit = layout_.unit((*schedule_)[use].unit);
  const std::uint64_t payload_bytes = unit.payload_elements * layout_.format().parameter_bytes();
  while (gathers_begun_ns_.size() <= use) gathers_begun_ns_.emplace_back(0);
  gathered_bytes_ += payload_bytes;
  gathers_.push_back(use);
  const AllGather gather{.target = target_.window + plan_->uses[use].offset_bytes,
                         .source = source,
                         .shard_bytes = layout_.shard_parameter_bytes(unit.id),
                         .subject = unit.name};
  const CollectiveSpan span{.unit = unit.id,
                            .size_bytes = payload_bytes,
                            .step = version_ + 1,
                            .begun_ns = &gathers_begun_ns_[use]};
  target_.gathers->submit(
      scheduler_,
      [this, gather, span, events, on_end] {
        for (const EventId event : events) device_.wait(gather_stream_.id(), event);
        target_.gathers->all_gather(gather, span, gather_stream_.id());
        device_.record(ready_event(span.unit), gather_stream_.id());
        if (on_end) device_.notify(gather_stream_.id(), on_end);
      },
      [this] { gather_queued(); });
}

void Prefetcher::gather_queued() {
  gathers_.pop_front();
  hooks_.on_change();
}

TraceRecord Prefetcher::resident(std::uint32_t unit, std::uint64_t end_ns) const {
  return {.begin_ns = resident_since_ns_[unit],
          .end_ns = end_ns,
          .size_bytes = layout_.unit_parameter_bytes(UnitId{unit}),
          .step = version_ + 1,
          .unit = unit,
          .kind = TraceKind::kResident};
}

void Prefetcher::trace_eviction(std::uint32_t unit, std::uint64_t end_ns) {
  if (resident_since_ns_[unit] == 0) return;
  trace_span(resident(unit, end_ns));
  resident_since_ns_[unit] = 0;
}

}  // namespace sluice
