#include "engine/flow/lane_updates.h"

#include <utility>

#include <sluice/error.h>
#include "base/trace/trace_ranges.h"
#include "engine/flow/block_update.h"
#include "engine/store/tiers.h"

namespace sluice {
namespace {

// One update runs, the next one waits for it: more would delay gradients on the same worker.
constexpr std::uint32_t kPostedMax = 2;
// Small blocks go to the worker together, up to about this many elements. One at a time, the
// threads would spend more on waking each other than on the update.
constexpr std::uint64_t kElementsWanted = 256 << 10;

BlockPlanes planes_of(const OptimizerLane& lane) {
  return {.parameters = lane.parameters, .record = lane.record, .gradients = lane.gradients};
}

}  // namespace

LaneUpdates::LaneUpdates(const FlowParts& parts, const ResidentUnits& residents, DeviceMath* math,
                         std::function<void(OptimizerLane& lane)> on_updated)
    : layout_(parts.layout),
      placement_(parts.placement),
      device_(parts.device),
      worker_(parts.worker),
      on_updated_(std::move(on_updated)),
      streamed_(parts.placement.streams_updates
                    ? std::make_unique<StreamedUpdates>(parts, residents, math)
                    : nullptr) {}

bool LaneUpdates::may_start(const OptimizerLane& lane) const {
  return is_streamed(lane) ? streamed_->may_update(layout_.block(lane.block))
                           : posted_ < kPostedMax;
}

void LaneUpdates::start(OptimizerLane& lane) {
  if (is_streamed(lane)) return stream(lane);
  together_.push_back(&lane);
  elements_ += layout_.block(lane.block).element_count;
  if (elements_ >= kElementsWanted) flush();
}

void LaneUpdates::flush() {
  if (together_.empty()) return;
  elements_ = 0;
  ++posted_;
  const std::vector<OptimizerLane*> together = std::exchange(together_, {});
  worker_.post(
      [this, together] {
        for (OptimizerLane* const lane : together) update(*lane);
      },
      [this, together] {
        --posted_;
        for (OptimizerLane* const lane : together) on_updated_(*lane);
      });
}

void LaneUpdates::stream(OptimizerLane& lane) {
  lane.overflow.reset();
  streamed_->update(layout_.block(lane.block), planes_of(lane), lane.coefficients, lane.step,
                    [this, &lane](bool has_overflowed) {
                      if (!has_overflowed) return on_updated_(lane);
                      worker_.post([this, &lane] { name_overflow(lane); },
                                   [this, &lane] { on_updated_(lane); });
                    });
}

// On the worker's thread, as the two functions below. An exception becomes the scheduler's failure
// before the block is written: on storage it keeps its old version. Earlier blocks have been
// updated, so policy "skip" cannot be kept here.
void LaneUpdates::update(OptimizerLane& lane) {
  const BlockPlace& block = layout_.block(lane.block);
  const TraceScope scope(
      {.size_bytes = layout_.parameter_bytes(lane.block) + layout_.record_bytes(lane.block),
       .step = lane.step,
       .unit = index_of(block.unit),
       .block = index_of(lane.block),
       .kind = TraceKind::kAdam});
  lane.overflow.reset();
  keep_assumed(lane, [&] {
    if (!lane.is_late)
      return update_block(layout_, block, planes_of(lane), lane.coefficients, lane.step,
                          worker_.optimizer());
    for (const auto& missed : lane.missed)
      update_block(layout_, block, planes_of(lane), missed->of(block.unit), lane.step,
                   worker_.optimizer());
  });
}

// The device has updated the block, and says that a weight or a moment has overflowed.
void LaneUpdates::name_overflow(OptimizerLane& lane) {
  const BlockPlace& block = layout_.block(lane.block);
  keep_assumed(lane, [&] {
    BlockPlanes planes = planes_of(lane);
    AlignedBuffer copy;
    if (placement_.parameter_tier[index_of(block.id)] == Tier::kDevice) {
      copy = read_back(device_, planes.parameters, layout_.parameter_bytes(block.id));
      planes.parameters = copy.data();
    }
    throw_if_overflowed(layout_, block, planes, lane.step);
    throw Error(ErrorCode::kInternal, "an update on the device says that unit \"" +
                                          layout_.unit(block.unit).name +
                                          "\" has overflowed, but all of it is finite");
  });
}

// An overflow under assumed coefficients is an error only if they turn out to be right.
void LaneUpdates::keep_assumed(OptimizerLane& lane, const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    if (!lane.is_assuming || error.code() != ErrorCode::kNonFinite) throw;
    lane.overflow = error;
  }
}

}  // namespace sluice
