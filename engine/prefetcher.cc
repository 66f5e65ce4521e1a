#include "engine/prefetcher.h"

#include <utility>

#include "base/error.h"
#include "base/trace.h"

namespace sluice {
namespace {

// Bounds the blocks in the pipeline that need no staging slot.
constexpr std::size_t kPipelineItemsMax = 256;

}  // namespace

Prefetcher::Prefetcher(const Layout& layout, const Placement& placement, const Tiers& tiers,
                       ParameterSlots& slots, BlockStore& store, Device& device,
                       Scheduler& scheduler, Hooks hooks)
    : layout_(layout),
      placement_(placement),
      tiers_(tiers),
      slots_(slots),
      store_(store),
      device_(device),
      scheduler_(scheduler),
      hooks_(std::move(hooks)),
      copy_stream_(device, "copy up", StreamPriority::kHigh) {
  for (std::size_t unit = 0; unit < layout.units().size(); ++unit) {
    ready_events_.emplace_back(device);
    release_events_.emplace_back(device);
  }
}

void Prefetcher::begin(const Schedule& schedule, const WindowPlan& plan, std::uint64_t version,
                       bool keeps_for_update) {
  SLUICE_CHECK(idle(), "a schedule begins when the one before it has ended");
  schedule_ = &schedule;
  plan_ = &plan;
  version_ = version;
  keeps_for_update_ = keeps_for_update;
  next_use_ = 0;
  next_block_ = 0;
  ready_uses_ = 0;
  is_stopped_ = false;
  released_.assign(schedule.size(), false);
  hooks_.on_change();
}

void Prefetcher::stop() {
  is_stopped_ = true;
}

void Prefetcher::resume(const Schedule& schedule, const WindowPlan& plan, std::uint32_t acquired) {
  SLUICE_CHECK(is_stopped_ && idle(), "a schedule changes when nothing is under way");
  schedule_ = &schedule;
  plan_ = &plan;
  next_use_ = ready_uses_ = acquired;
  next_block_ = 0;
  is_stopped_ = false;
  released_.resize(schedule.size());
  hooks_.on_change();
}

void Prefetcher::release(std::uint32_t use) {
  released_[use] = true;
  hooks_.on_change();
}

void Prefetcher::pump() {
  process_head();
  while (!is_stopped_ && !scheduler_.failed() && issue_next()) process_head();
}

// Issues the next block, or the next use that needs none. False when something has to happen first.
bool Prefetcher::issue_next() {
  awaits_update_ = false;
  if (next_use_ == schedule_->size() || pipeline_.size() == kPipelineItemsMax) return false;
  const std::uint32_t use = next_use_;
  if (next_block_ == 0 && !may_start(use)) return false;
  if (!plan_->uses[use].fetch) {
    pipeline_.push_back({.use = use, .is_first = true, .is_last = true});
    finish_issue(use);
    return true;
  }
  const auto blocks = layout_.blocks_of((*schedule_)[use].unit);
  const BlockPlace& block = blocks[next_block_];
  if (!is_updated(block)) {
    awaits_update_ = true;
    return false;
  }
  const bool is_last = next_block_ + 1 == blocks.size();
  if (!issue_block(use, block, next_block_ == 0, is_last)) return false;
  ++next_block_;
  if (is_last) finish_issue(use);
  return true;
}

void Prefetcher::finish_issue(std::uint32_t use) {
  ++next_use_;
  next_block_ = 0;
  if ((*schedule_)[use].final_gradient) hooks_.on_final_fetch((*schedule_)[use].unit);
}

// Whether what the use overwrites is free, and, for a unit homed on the device, whether it has been
// updated.
bool Prefetcher::may_start(std::uint32_t use) {
  for (const std::uint32_t evicted : plan_->uses[use].evicted_uses) {
    if (!released_[evicted]) return false;
  }
  const UnitPlace& unit = layout_.unit((*schedule_)[use].unit);
  if (!placement_.unit_is_on_device(unit)) return true;
  for (const BlockPlace& block : layout_.blocks_of(unit.id)) {
    if (is_updated(block)) continue;
    awaits_update_ = true;
    return false;
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
  if (placement_.parameter_tier[index_of(block.id)] == Tier::kNvme) {
    if (const auto bound = slots_.find(block.id)) {
      // Without keeping, as under the serial policy, traffic is what was predicted, to the byte:
      // the block's earlier fetch ends first.
      if (placement_.kept_slots == 0 && !slots_.is_in_pass(*bound)) return false;
      // What a cancelled update has made of the bytes is of no use: the pass lets go of them soon.
      if (!slots_.will_hold(*bound, version_of(block.id))) return false;
      item.slot = *bound;
      slots_.join(*bound, SlotUser::kPrefetch);
    } else {
      const auto taken = slots_.take(block.id, SlotUser::kPrefetch);
      if (!taken) return false;
      item.slot = *taken;
      slots_.fetch(*taken, version_of(block.id));
    }
  }
  pipeline_.push_back(item);
  return true;
}

// Queues the copies of whatever has arrived at the front, in schedule order.
void Prefetcher::process_head() {
  while (!pipeline_.empty()) {
    const Item item = pipeline_.front();
    const bool has_arrived =
        item.slot == kNoSlot || slots_.holds(item.slot, version_of(BlockId{item.block}));
    const bool is_void = scheduler_.failed();  // its bytes may mean nothing
    if (!has_arrived && (!is_void || slots_.is_transferring(item.slot))) return;
    pipeline_.pop_front();
    if (is_void) {
      if (item.slot != kNoSlot) slots_.leave(item.slot, SlotUser::kPrefetch, /*keep=*/false);
      continue;
    }
    if (item.block != kNoBlock) copy_block(item, layout_.block(BlockId{item.block}));
    if (!item.is_last) continue;
    if (item.block != kNoBlock)
      device_.record(ready_event((*schedule_)[item.use].unit), copy_stream_.id());
    ready_uses_ = item.use + 1;
  }
}

void Prefetcher::copy_block(const Item& item, const BlockPlace& block) {
  const WindowUse& place = plan_->uses[item.use];
  if (item.is_first) {
    for (const std::uint32_t evicted : place.evicted_uses)
      device_.wait(copy_stream_.id(), release_event((*schedule_)[evicted].unit));
  }
  const std::uint64_t offset = block.offset_elements * layout_.format().parameter_bytes();
  const std::byte* source =
      item.slot == kNoSlot ? tiers_.host_parameters(block.id) : slots_.data(item.slot);
  device_.copy(tiers_.window() + place.offset_bytes + offset, source,
               layout_.parameter_bytes(block.id), copy_stream_.id());
  copies_.push_back({.block = item.block,
                     .slot = item.slot,
                     .begin_ns = steady_now_ns(),
                     .keep = keeps_for_update_ && (*schedule_)[item.use].final_gradient});
  device_.call_host(copy_stream_.id(), [this] { scheduler_.post([this] { copied(); }); });
}

void Prefetcher::copied() {
  const Copy copy = copies_.front();
  copies_.pop_front();
  if (copy.slot != kNoSlot) slots_.leave(copy.slot, SlotUser::kPrefetch, copy.keep);
  if (trace_enabled()) {
    trace_record({.begin_ns = copy.begin_ns,
                  .end_ns = steady_now_ns(),
                  .size_bytes = layout_.parameter_bytes(BlockId{copy.block}),
                  .step = version_,
                  .unit = index_of(layout_.block(BlockId{copy.block}).unit),
                  .block = copy.block,
                  .kind = TraceKind::kCopyToDevice});
  }
  hooks_.on_change();
}

}  // namespace sluice
