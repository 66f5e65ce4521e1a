#include "engine/flow/host_gradients.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <sluice/units.h>
#include "base/trace/trace_ranges.h"
#include "engine/flow/counted_norm.h"

namespace sluice {

HostGradients::HostGradients(const FlowParts& parts, Callbacks callbacks)
    : GradientHome(std::move(callbacks)),
      layout_(parts.layout),
      counted_(parts.counted),
      placement_(parts.placement),
      tiers_(parts.tiers),
      device_(parts.device),
      scheduler_(parts.scheduler),
      worker_(parts.worker),
      staging_(parts.placement.gradient_staging.count),
      norms_(parts.layout.units().size()) {}

void HostGradients::start(const GradientMove& move, StreamId stream) {
  if (move.is_first) {
    copy_to_set(layout_, tiers_, device_, move, stream);
    device_.notify(stream, [this] { scheduler_.post([this] { copied_whole(); }); });
    return;
  }
  move_ = move;
  stream_ = stream;
  next_element_ = 0;
  takes_norm_ = move.is_last;
  copies_left_ = additions_left_ =
      static_cast<std::uint32_t>(div_ceil(move.range.count, layout_.block_elements()));
  pump();
}

void HostGradients::copied_whole() {
  callbacks_.on_left();
  callbacks_.on_home();
}

// One report for the copies into all slots that are free now.
void HostGradients::pump() {
  CopyRuns runs(device_, stream_);
  std::vector<std::uint32_t> slots;
  for (std::uint32_t slot = 0; slot < staging_.size(); ++slot) {
    if (next_element_ >= move_.range.count) break;
    if (!staging_[slot].is_free) continue;
    start_piece(slot, runs);
    slots.push_back(slot);
  }
  if (slots.empty()) return;
  runs.flush();
  device_.notify(stream_, [this, slots = std::move(slots)]() mutable {
    scheduler_.post([this, slots = std::move(slots)] {
      for (const std::uint32_t slot : slots) copied(slot);
    });
  });
}

void HostGradients::start_piece(std::uint32_t slot, CopyRuns& runs) {
  const GradientRange piece{
      .unit = move_.range.unit,
      .begin = move_.range.begin + next_element_,
      .count = std::min(layout_.block_elements(), move_.range.count - next_element_)};
  next_element_ += layout_.block_elements();
  const std::uint64_t element_bytes = layout_.format().gradient_bytes();
  staging_[slot] = {.piece = piece, .is_free = false};
  scheduler_.pools().lend(MemoryPool::kGradientStaging, placement_.gradient_staging.slot_bytes);
  runs.add(tiers_.gradient_staging(slot), move_.data + piece.begin * element_bytes,
           piece.count * element_bytes);
}

void HostGradients::copied(std::uint32_t slot) {
  worker_.post([this, slot] { add(slot); }, [this, slot] { added(slot); });
  if (--copies_left_ == 0) callbacks_.on_left();
}

// For traces: pieces of parts that other ranks update are not blocks.
std::uint32_t HostGradients::block_of(const GradientRange& piece) const {
  const UnitPlace& unit = layout_.unit(piece.unit);
  if (move_.range.begin != unit.shard_begin || move_.range.count != unit.shard_elements)
    return kTraceNone;
  return unit.first_block +
         static_cast<std::uint32_t>((piece.begin - unit.shard_begin) / layout_.block_elements());
}

// On the worker's thread.
void HostGradients::add(std::uint32_t slot) {
  const GradientRange& piece = staging_[slot].piece;
  const StateFormat& format = layout_.format();
  const TraceScope scope({.size_bytes = piece.count * format.gradient_bytes(),
                          .step = move_.step,
                          .unit = index_of(piece.unit),
                          .block = block_of(piece),
                          .kind = takes_norm_ ? TraceKind::kNorm : TraceKind::kAccumulate});
  const std::byte* const addend = tiers_.gradient_staging(slot);
  if (!takes_norm_)
    return worker_.optimizer().accumulate(format.gradient, in_set(layout_, tiers_, piece), addend,
                                          piece.count);
  NormAccumulator& total = norms_[index_of(piece.unit)].total;
  if (piece.begin == move_.range.begin) total = {};
  total.merge(
      counted_norm(layout_, counted_, piece.unit, piece.begin, piece.count,
                   [&](std::uint64_t begin, std::uint64_t count, NormAccumulator& norm) {
                     worker_.optimizer().accumulate_with_norm(
                         format.gradient, in_set(layout_, tiers_, {piece.unit, begin, count}),
                         addend + (begin - piece.begin) * format.gradient_bytes(), count, norm);
                   }));
}

void HostGradients::added(std::uint32_t slot) {
  staging_[slot].is_free = true;
  scheduler_.pools().take_back(MemoryPool::kGradientStaging,
                               placement_.gradient_staging.slot_bytes);
  if (--additions_left_ != 0) return pump();
  norms_[index_of(move_.range.unit)].is_of_sum = takes_norm_;
  callbacks_.on_home();
}

void HostGradients::take_norm(const GradientSum& sum, StreamId) {
  if (std::exchange(norms_[index_of(sum.unit)].is_of_sum, false))
    return callbacks_.on_norm(sum.unit);
  const auto work = [this, sum] { measure(sum); };
  const auto done = [this, sum] { callbacks_.on_norm(sum.unit); };
  const bool is_short = layout_.set_gradient_bytes(sum.unit) <= device_.at_once_bytes_max();
  is_short ? worker_.post_here(work, done) : worker_.post(work, done);
}

// On the worker's thread.
void HostGradients::measure(const GradientSum& sum) {
  if (!sum.has_gradient)
    std::memset(tiers_.gradient_set(sum.unit), 0, layout_.set_gradient_bytes(sum.unit));
  const GradientRange own = owned_range(layout_, sum.unit);
  const StateFormat& format = layout_.format();
  const TraceScope scope({.size_bytes = own.count * format.gradient_bytes(),
                          .step = sum.step,
                          .unit = index_of(sum.unit),
                          .kind = TraceKind::kNorm});
  norms_[index_of(sum.unit)].total = counted_norm(
      layout_, counted_, sum.unit, own.begin, own.count,
      [&](std::uint64_t begin, std::uint64_t count, NormAccumulator& norm) {
        worker_.optimizer().add_squared_norm(
            format.gradient, in_set(layout_, tiers_, {sum.unit, begin, count}), count, norm);
      });
}

std::optional<std::uint64_t> HostGradients::first_non_finite(const GradientRange& range) const {
  return find_non_finite(layout_.format().gradient, in_set(layout_, tiers_, range), range.count);
}

}  // namespace sluice
