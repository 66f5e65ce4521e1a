#include "engine/optimizer_pass.h"

#include "base/error.h"
#include "base/trace.h"

namespace sluice {

OptimizerPass::OptimizerPass(const Layout& layout, const Placement& placement, const Tiers& tiers,
                             BlockStore& store, Device& device, Scheduler& scheduler,
                             Worker& worker)
    : layout_(layout),
      placement_(placement),
      tiers_(tiers),
      store_(store),
      device_(device),
      scheduler_(scheduler),
      worker_(worker),
      lanes_(placement.lanes.count),
      blocks_done_(layout.blocks().size()),
      down_stream_(device, "optimizer down"),
      up_stream_(device, "optimizer up") {
  next_block_ = static_cast<std::uint32_t>(layout.blocks().size());
  for (std::uint32_t lane = 0; lane < lanes_.size(); ++lane) {
    lanes_[lane].parameter_transfer.done = [this, lane] { transferred(lane); };
    lanes_[lane].record_transfer.done = [this, lane] { transferred(lane); };
  }
}

void OptimizerPass::begin(const StepCoefficients& coefficients, std::uint64_t version) {
  SLUICE_CHECK(idle() && is_complete(), "a pass begins when the one before it has ended");
  coefficients_ = coefficients;
  version_ = version;
  next_block_ = 0;
  blocks_done_ = 0;
  pump();
}

void OptimizerPass::pump() {
  for (std::uint32_t lane = 0; lane < lanes_.size(); ++lane) {
    if (next_block_ == layout_.blocks().size() || scheduler_.failed()) return;
    if (!lanes_[lane].is_busy) start_block(lane);
  }
}

void OptimizerPass::start_block(std::uint32_t index) {
  Lane& lane = lanes_[index];
  const BlockPlace& block = layout_.blocks()[next_block_++];
  lane.block = block.id;
  lane.is_busy = true;
  lane.is_updated = false;
  lane.pending = 1;  // held by this function, so that no completion moves on before every transfer
                     // has been started
  ++lanes_busy_;
  const Tier parameter_tier = placement_.parameter_tier[index_of(block.id)];
  lane.parameters =
      parameter_tier == Tier::kHost ? tiers_.host_parameters(block.id) : tiers_.lane(index);
  const bool record_in_host = placement_.record_tier[index_of(block.id)] == Tier::kHost;
  lane.record = record_in_host ? tiers_.host_record(block.id)
                               : tiers_.lane(index) + placement_.lane_parameter_bytes;
  if (!record_in_host) {
    ++lane.pending;
    store_.fetch(lane.record_transfer, block.id, Plane::kRecord, lane.record, version_);
  }
  if (parameter_tier == Tier::kNvme) {
    ++lane.pending;
    store_.fetch(lane.parameter_transfer, block.id, Plane::kParameter, lane.parameters, version_);
  } else if (parameter_tier == Tier::kDevice) {
    device_.copy(lane.parameters, resident_block(block), layout_.parameter_bytes(block.id),
                 down_stream_.id());
    add_pending_copy(index, down_stream_.id());
  }
  transferred(index);
}

void OptimizerPass::add_pending_copy(std::uint32_t lane, StreamId stream) {
  ++lanes_[lane].pending;
  device_.call_host(stream, [this, lane] { scheduler_.post([this, lane] { transferred(lane); }); });
}

// One transfer or copy less to wait for. After the last one comes the next phase.
void OptimizerPass::transferred(std::uint32_t index) {
  Lane& lane = lanes_[index];
  if (--lane.pending != 0) return;
  if (lane.is_updated || scheduler_.failed()) {
    finish_block(index);
  } else {
    worker_.post([this, index] { update(index); }, [this, index] { updated(index); });
  }
}

// On the worker's thread. What it throws becomes the scheduler's failure before the block is
// written: on storage it keeps its old version. Blocks before it are updated, so policy "skip"
// cannot hold here.
void OptimizerPass::update(std::uint32_t index) {
  const Lane& lane = lanes_[index];
  const BlockPlace& block = layout_.block(lane.block);
  const std::uint64_t begin_ns = steady_now_ns();
  const BlockPlanes planes{.parameters = lane.parameters,
                           .record = lane.record,
                           .gradients = tiers_.gradient_set(block.unit) +
                                        block.offset_elements * layout_.format().gradient_bytes()};
  update_block(layout_, block, planes, coefficients_, version_ + 1, worker_.optimizer());
  if (trace_enabled()) {
    trace_record(
        {.begin_ns = begin_ns,
         .end_ns = steady_now_ns(),
         .size_bytes = layout_.parameter_bytes(lane.block) + layout_.record_bytes(lane.block),
         .step = version_ + 1,
         .unit = index_of(block.unit),
         .block = index_of(lane.block),
         .kind = TraceKind::kAdam});
  }
}

void OptimizerPass::updated(std::uint32_t index) {
  if (scheduler_.failed()) return finish_block(index);
  Lane& lane = lanes_[index];
  const BlockPlace& block = layout_.block(lane.block);
  lane.is_updated = true;
  lane.pending = 1;
  if (placement_.record_tier[index_of(block.id)] == Tier::kHost) {
    store_.advance(block.id, Plane::kRecord, version_ + 1);
  } else {
    ++lane.pending;
    store_.store(lane.record_transfer, block.id, Plane::kRecord, lane.record, version_ + 1);
  }
  switch (placement_.parameter_tier[index_of(block.id)]) {
    case Tier::kHost: store_.advance(block.id, Plane::kParameter, version_ + 1); break;
    case Tier::kNvme:
      ++lane.pending;
      store_.store(lane.parameter_transfer, block.id, Plane::kParameter, lane.parameters,
                   version_ + 1);
      break;
    case Tier::kDevice:
      device_.copy(resident_block(block), lane.parameters, layout_.parameter_bytes(block.id),
                   up_stream_.id());
      add_pending_copy(index, up_stream_.id());
      store_.advance(block.id, Plane::kParameter, version_ + 1);
      break;
  }
  transferred(index);
}

void OptimizerPass::finish_block(std::uint32_t index) {
  Lane& lane = lanes_[index];
  if (lane.is_updated) ++blocks_done_;
  lane.is_busy = false;
  --lanes_busy_;
  pump();
}

std::byte* OptimizerPass::resident_block(const BlockPlace& block) const {
  return tiers_.resident_parameters(block.unit) +
         block.offset_elements * layout_.format().parameter_bytes();
}

}  // namespace sluice
