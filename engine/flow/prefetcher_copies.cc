// The part of Prefetcher that copies blocks to the device and follows the copies to their end.
#include <algorithm>
#include <utility>

#include "base/trace/trace_recorder.h"
#include "engine/flow/prefetcher.h"

namespace sluice {
namespace {

// The end of copies out of slots is reported at least per this many bytes, so that reads go on into
// the first slots while the last are still copied. Copies out of homes in host memory hold nothing
// back: one report per unit is enough.
constexpr std::uint64_t kNoticeBytes = 8 << 20;

}  // namespace

void Prefetcher::copy_block(const Item& item, const BlockPlace& block) {
  const WindowUse& place = plan_->uses[item.use];
  const bool is_gated = item.is_first && !place.evicted_uses.empty();
  if (is_gated) {
    copy_runs_.flush();
    for (const std::uint32_t evicted : place.evicted_uses)
      device_.wait(copy_stream_.id(), release_event((*schedule_)[evicted].unit));
    // Gates open in the order of the copies after them.
    device_.notify(copy_stream_.id(), [this, use = item.use] {
      scheduler_.post([this, use] {
        for (const std::uint32_t evicted : plan_->uses[use].evicted_uses)
          trace_eviction(index_of((*schedule_)[evicted].unit), trace_now_ns());
        std::ranges::find_if(copies_, &Copy::is_gated)->is_gated = false;
        meter_copies();
      });
    });
  }
  const std::uint64_t offset = block.offset_elements * layout_.format().parameter_bytes();
  const std::byte* source =
      item.slot == kNoSlot ? tiers_.host_parameters(block.id) : slots_.data(item.slot);
  copy_runs_.add(target_.window + place.offset_bytes + offset, source,
                 layout_.parameter_bytes(block.id));
  copies_.push_back(
      {.block = item.block,
       .slot = item.slot,
       .begin_ns = trace_now_ns(),
       .range = begin_trace_range({.unit = index_of(block.unit), .kind = TraceKind::kCopyToDevice}),
       .unit_copied = item.is_last ? index_of(block.unit) : kNoUnit,
       .is_gated = is_gated,
       .keep = keeps_for_update_ && (*schedule_)[item.use].final_gradient});
  meter_copies();
  copied_bytes_ += layout_.parameter_bytes(block.id);
  ++unnoticed_copies_;
  if (item.slot != kNoSlot) unnoticed_slot_bytes_ += layout_.parameter_bytes(block.id);
  if (item.is_last || unnoticed_slot_bytes_ >= kNoticeBytes) request_notice();
}

void Prefetcher::request_notice() {
  if (unnoticed_copies_ == 0) return;
  copy_runs_.flush();
  unnoticed_slot_bytes_ = 0;
  device_.notify(copy_stream_.id(), [this, count = std::exchange(unnoticed_copies_, 0u)] {
    scheduler_.post([this, count] { copied(count); });
  });
}

// The first `count` copies have ended, the last of them now. Their bytes tell when the others did.
void Prefetcher::copied(std::uint32_t count) {
  const std::uint64_t begin_ns = std::max(copies_.front().begin_ns, copying_since_ns_);
  const std::uint64_t now_ns = std::max(trace_now_ns(), begin_ns);
  const auto bytes_of = [&](const Copy& copy) {
    return layout_.parameter_bytes(BlockId{copy.block});
  };
  std::uint64_t all_bytes = 0;
  for (std::uint32_t i = 0; i < count; ++i) all_bytes += bytes_of(copies_[i]);
  std::uint64_t bytes = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    bytes += bytes_of(copies_.front());
    const double share = static_cast<double>(bytes) / static_cast<double>(all_bytes);
    const auto spent_ns =
        static_cast<std::uint64_t>(static_cast<double>(now_ns - begin_ns) * share);
    end_copy(std::max(begin_ns + spent_ns, copies_.front().begin_ns));
  }
  meter_copies();
  hooks_.on_change();
}

void Prefetcher::end_copy(std::uint64_t end_ns) {
  Copy copy = copies_.front();
  copies_.pop_front();
  if (copy.slot != kNoSlot) slots_.leave(copy.slot, SlotUser::kPrefetch, copy.keep);
  trace_span({.begin_ns = copy.begin_ns,
              .end_ns = end_ns,
              .started_ns = std::max(copy.begin_ns, copying_since_ns_),
              .moved_ns = end_ns,
              .size_bytes = layout_.parameter_bytes(BlockId{copy.block}),
              .step = version_ + 1,
              .unit = index_of(layout_.block(BlockId{copy.block}).unit),
              .block = copy.block,
              .kind = TraceKind::kCopyToDevice});
  end_trace_range(copy.range);
  if (copy.unit_copied != kNoUnit) {
    resident_since_ns_[copy.unit_copied] = end_ns;
    trace_begin(resident(copy.unit_copied, end_ns));
  }
  copying_since_ns_ = end_ns;
}

// The device is copying while the first copy's gate is open.
void Prefetcher::meter_copies() {
  const bool is_copying = !copies_.empty() && !copies_.front().is_gated;
  if (is_copying == is_copying_) return;
  is_copying_ = is_copying;
  if (is_copying) {
    copying_since_ns_ = trace_now_ns();
    scheduler_.work().begin(Work::kCopyUp);
  } else {
    scheduler_.work().end(Work::kCopyUp);
  }
}

}  // namespace sluice
