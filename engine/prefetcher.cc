#include "engine/prefetcher.h"

#include "base/error.h"
#include "base/trace.h"

namespace sluice {
namespace {

// Bounds the blocks in the pipeline that need no staging slot.
constexpr std::size_t kPipelineItemsMax = 256;

}  // namespace

Prefetcher::Prefetcher(const Layout& layout, const Placement& placement, const Tiers& tiers,
                       BlockStore& store, Device& device, Scheduler& scheduler)
    : layout_(layout),
      placement_(placement),
      tiers_(tiers),
      store_(store),
      device_(device),
      scheduler_(scheduler),
      slots_(placement.parameter_staging.count),
      copy_stream_(device, "copy up") {
  for (std::size_t unit = 0; unit < layout.units().size(); ++unit) {
    ready_events_.emplace_back(device);
    release_events_.emplace_back(device);
  }
  for (std::uint32_t slot = 0; slot < slots_.size(); ++slot) {
    slots_[slot].transfer.done = [this, slot] { arrived(slot); };
    slots_[slot].transfer.read_priority = IoPriority::kHigh;  // computation waits for these
  }
}

void Prefetcher::begin(const Schedule& schedule, const WindowPlan& plan, std::uint64_t version) {
  SLUICE_CHECK(idle(), "a schedule begins when the one before it has ended");
  schedule_ = &schedule;
  plan_ = &plan;
  version_ = version;
  next_use_ = 0;
  next_block_ = 0;
  ready_uses_ = 0;
  is_stopped_ = false;
  released_.assign(schedule.size(), false);
  pump();
}

void Prefetcher::stop() {
  is_stopped_ = true;
}

void Prefetcher::release(std::uint32_t use) {
  released_[use] = true;
  pump();
}

void Prefetcher::pump() {
  process_head();
  while (!is_stopped_ && !scheduler_.failed() && issue_next()) process_head();
}

// Issues the next block, or the next use that needs none. False when something has to happen first.
bool Prefetcher::issue_next() {
  if (next_use_ == schedule_->size() || pipeline_.size() == kPipelineItemsMax) return false;
  const std::uint32_t use = next_use_;
  if (!plan_->uses[use].fetch) {
    pipeline_.push_back({.use = use, .is_first = true, .is_last = true, .has_arrived = true});
    ++next_use_;
    return true;
  }
  if (next_block_ == 0 && !may_start(use)) return false;
  const auto blocks = layout_.blocks_of((*schedule_)[use].unit);
  const bool is_last = next_block_ + 1 == blocks.size();
  if (!issue_block(use, blocks[next_block_], next_block_ == 0, is_last)) return false;
  ++next_block_;
  if (is_last) {
    ++next_use_;
    next_block_ = 0;
  }
  return true;
}

bool Prefetcher::may_start(std::uint32_t use) const {
  for (const std::uint32_t evicted : plan_->uses[use].evicted_uses) {
    if (!released_[evicted]) return false;
  }
  return true;
}

bool Prefetcher::issue_block(std::uint32_t use, const BlockPlace& block, bool is_first,
                             bool is_last) {
  Item item{.use = use, .block = index_of(block.id), .is_first = is_first, .is_last = is_last};
  if (placement_.parameter_tier[index_of(block.id)] == Tier::kHost) {
    item.has_arrived = true;
    pipeline_.push_back(item);
    return true;
  }
  item.staging_slot = take_slot();
  if (item.staging_slot == kNoSlot) return false;
  StagingSlot& slot = slots_[item.staging_slot];
  slot.item = head_item_ + pipeline_.size();
  pipeline_.push_back(item);
  store_.fetch(slot.transfer, block.id, Plane::kParameter,
               tiers_.parameter_staging(item.staging_slot), version_);
  return true;
}

// Queues the copies of whatever has arrived at the front, in schedule order.
void Prefetcher::process_head() {
  while (!pipeline_.empty() && pipeline_.front().has_arrived) {
    const Item item = pipeline_.front();
    pipeline_.pop_front();
    ++head_item_;
    if (scheduler_.failed()) {  // its bytes may mean nothing
      if (item.staging_slot != kNoSlot) slots_[item.staging_slot].is_free = true;
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
  const std::byte* source = item.staging_slot == kNoSlot
                                ? tiers_.host_parameters(block.id)
                                : tiers_.parameter_staging(item.staging_slot);
  device_.copy(tiers_.window() + place.offset_bytes + offset, source,
               layout_.parameter_bytes(block.id), copy_stream_.id());
  ++copies_in_flight_;
  const std::uint32_t slot = item.staging_slot;
  if (slot != kNoSlot) slots_[slot].copy_begin_ns = steady_now_ns();
  device_.call_host(copy_stream_.id(),
                    [this, slot] { scheduler_.post([this, slot] { copied(slot); }); });
}

void Prefetcher::arrived(std::uint32_t slot) {
  pipeline_[slots_[slot].item - head_item_].has_arrived = true;
  pump();
}

void Prefetcher::copied(std::uint32_t slot) {
  --copies_in_flight_;
  if (slot != kNoSlot) {
    StagingSlot& staging = slots_[slot];
    staging.is_free = true;
    if (trace_enabled()) {
      trace_record({.begin_ns = staging.copy_begin_ns,
                    .end_ns = steady_now_ns(),
                    .size_bytes = layout_.parameter_bytes(staging.transfer.block),
                    .step = version_,
                    .unit = index_of(layout_.block(staging.transfer.block).unit),
                    .block = index_of(staging.transfer.block),
                    .kind = TraceKind::kCopyToDevice});
    }
  }
  pump();
}

std::uint32_t Prefetcher::take_slot() {
  for (std::uint32_t slot = 0; slot < slots_.size(); ++slot) {
    if (!slots_[slot].is_free) continue;
    slots_[slot].is_free = false;
    return slot;
  }
  return kNoSlot;
}

}  // namespace sluice
