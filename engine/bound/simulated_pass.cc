#include "engine/bound/simulated_pass.h"

#include <algorithm>

#include <sluice/error.h>

namespace sluice {

SimulatedPass::SimulatedPass(const StepShape& shape, OverlapPolicy policy,
                             SimulatedMachine& machine, SimulatedSlots& slots,
                             SimulatedCommits& commits)
    : layout_(shape.layout),
      placement_(shape.placement),
      policy_(policy),
      machine_(machine),
      slots_(slots),
      commits_(commits),
      blocks_(shape.layout.blocks().size()),
      units_(shape.layout.units().size()),
      is_updated_(updated_units(shape.layout, shape.placement, shape.schedule)),
      lanes_free_(shape.placement.lanes.count),
      staging_free_(shape.placement.update_staging.count),
      block_at_place_(shape.layout.blocks().size()) {
  for (const ScheduledUse& use : shape.schedule) {
    if (use.final_gradient) arrival_order_.push_back(use.unit);
  }
  for (const BlockPlace& block : layout_.blocks()) {
    Block& own = blocks_[index_of(block.id)];
    if (!is_updated_[index_of(block.unit)]) {
      own.updates = own.grants = UINT64_MAX;
    } else if (record_tier(index_of(block.id)) == Tier::kDevice) {
      own.grants = UINT64_MAX;
      ++device_blocks_;
    } else {
      ++trained_blocks_;
    }
  }
}

bool SimulatedPass::has_updated(UnitId unit, std::uint64_t steps) const {
  return !is_updated_[index_of(unit)] ||
         units_[index_of(unit)].updates >= steps * layout_.unit(unit).block_count;
}

bool SimulatedPass::is_eager(std::uint32_t block) const {
  if (policy_ == OverlapPolicy::kSpeculative)
    return parameter_tier(block) == Tier::kNvme && record_tier(block) == Tier::kNvme &&
           gradient_tier(block) == Tier::kHost;
  return policy_ == OverlapPolicy::kEager;
}

bool SimulatedPass::settle() {
  if (come_home_.empty()) return false;
  for (const std::uint32_t index : come_home_) {
    // The next forward, which follows the update from the turn on, needs these parameters.
    const bool is_wanted = parameter_tier(index) == Tier::kNvme &&
                           policy_ != OverlapPolicy::kSerial &&
                           normed_steps_ >= blocks_[index].grants;
    slots_.leave(index, SimulatedUser::kLane, is_wanted);
  }
  come_home_.clear();
  return true;
}

bool SimulatedPass::pump() {
  if (trained_blocks_ == 0) return false;
  if (granted_ == (pass_ + 1) * trained_blocks_) {
    ++pass_;
    next_block_ = 0;
    next_arrival_ = 0;
    arrival_block_ = 0;
  }
  if (normed_steps_ > pass_ || policy_ == OverlapPolicy::kDeferred) return grant_by_unit();
  return policy_ != OverlapPolicy::kSerial && grant_by_arrival();
}

bool SimulatedPass::grant_by_unit() {
  while (blocks_[next_block_].grants > pass_) ++next_block_;
  return try_grant(next_block_);
}

bool SimulatedPass::grant_by_arrival() {
  for (; next_arrival_ < arrival_order_.size(); ++next_arrival_, arrival_block_ = 0) {
    const UnitPlace& unit = layout_.unit(arrival_order_[next_arrival_]);
    for (; arrival_block_ < unit.block_count; ++arrival_block_) {
      const std::uint32_t block = unit.first_block + arrival_block_;
      if (blocks_[block].grants == pass_ && is_eager(block)) return try_grant(block);
    }
  }
  return false;  // the rest waits for the norm
}

bool SimulatedPass::try_grant(std::uint32_t index) {
  Block& block = blocks_[index];
  if (block.in_pass || (needs_lane(index) && lanes_free_ == 0)) return false;
  const bool is_bound = slots_.is_bound(index);
  if (needs_slot(index) && !slots_.take(index, SimulatedUser::kLane)) return false;
  if (needs_lane(index)) --lanes_free_;
  block.in_pass = true;
  block.place = granted_++;
  block_at_place_[block.place % blocks_.size()] = index;
  ++block.grants;
  block.pending = 1;  // held until every part has been requested
  if (record_tier(index) == Tier::kNvme) {
    ++block.pending;
    machine_.read({SimulatedTask::kLoad, index, ranked(1, 3 * block.place)},
                  layout_.record_slot_bytes(BlockId{index}));
  }
  if (needs_slot(index)) load_parameters(index, is_bound);
  if (fetches_gradients(index)) {
    ++block.pending;
    block.awaits_gradients = true;
    load_gradients(index);
  }
  part_loaded(index);
  return true;
}

// Reads into the lane's slot, unless the parameters are there or on their way.
void SimulatedPass::load_parameters(std::uint32_t index, bool is_bound) {
  if (slots_.is_valid(index)) return;
  Block& block = blocks_[index];
  ++block.pending;
  block.awaits_slot = true;
  if (is_bound) return;
  const SimulatedJob job{SimulatedTask::kFetch, index, ranked(1, 3 * block.place + 1)};
  const BlockId id{index};
  if (parameter_tier(index) == Tier::kDevice) {
    machine_.copy_down(job, layout_.parameter_bytes(id));
  } else {
    machine_.read(job, layout_.parameter_slot_bytes(id));
  }
}

void SimulatedPass::slot_filled(std::uint32_t index) {
  Block& block = blocks_[index];
  if (!block.awaits_slot) return;
  block.awaits_slot = false;
  part_loaded(index);
}

void SimulatedPass::part_loaded(std::uint32_t index) {
  Block& block = blocks_[index];
  if (--block.pending != 0) return;
  block.is_loaded = true;
  note_if_ready(index);
}

void SimulatedPass::gradient_final(UnitId unit, std::uint64_t step) {
  units_[index_of(unit)].drained_steps = step + 1;
  if (policy_ == OverlapPolicy::kEager) update_on_device(unit);
  for (const BlockPlace& block : layout_.blocks_of(unit)) note_if_ready(index_of(block.id));
}

void SimulatedPass::update_on_device(UnitId unit) {
  if (!is_updated_[index_of(unit)] || !placement_.is_updated_on_device(layout_.unit(unit))) return;
  for (const BlockPlace& block : layout_.blocks_of(unit)) update_on_device(block);
}

void SimulatedPass::update_on_device(const BlockPlace& block) {
  const std::uint32_t index = index_of(block.id);
  blocks_[index].awaits_save = commits_.is_saving(index);
  if (blocks_[index].awaits_save) return;
  machine_.device_adam({SimulatedTask::kDeviceAdam, index, ranked(0, sent_to_device_++)},
                       block.element_count);
}

void SimulatedPass::saved(std::uint32_t index) {
  if (blocks_[index].awaits_save) return update_on_device(layout_.block(BlockId{index}));
  note_if_ready(index);
}

void SimulatedPass::norm_known(std::uint64_t step) {
  normed_steps_ = step + 1;
  if (policy_ != OverlapPolicy::kEager)
    for (const UnitPlace& unit : layout_.units()) update_on_device(unit.id);
  for (std::uint32_t block = 0; block < blocks_.size(); ++block) note_if_ready(block);
}

void SimulatedPass::add_to(SimulatedState& state, std::uint64_t step) const {
  for (const Block& block : blocks_) {
    state.add(block.updates == UINT64_MAX ? block.updates : block.updates - step);
    state.add(block.grants == UINT64_MAX ? block.grants : block.grants - step);
    state.add(block.in_pass ? granted_ - block.place : 0);
    state.add(std::uint64_t{block.pending} << 5 | std::uint64_t{block.in_pass} << 4 |
              std::uint64_t{block.awaits_slot} << 3 | std::uint64_t{block.awaits_gradients} << 2 |
              std::uint64_t{block.is_loaded} << 1 | std::uint64_t{block.is_ready});
  }
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    if (!is_updated_[unit]) continue;
    state.add(units_[unit].drained_steps - step);
    state.add(units_[unit].updates - step * layout_.units()[unit].block_count);
  }
  for (const std::uint64_t count :
       {trained_blocks_ == 0 ? 0 : pass_ - step, granted_ - step * trained_blocks_,
        normed_steps_ - step, home_ - step * trained_blocks_,
        sent_to_device_ - step * device_blocks_, updated_on_device_ - step * device_blocks_,
        std::uint64_t{lanes_free_}, std::uint64_t{staging_free_}, std::uint64_t{next_block_},
        std::uint64_t{next_arrival_}, std::uint64_t{arrival_block_}})
    state.add(count);
}

bool SimulatedPass::may_update(std::uint32_t index) const {
  const UnitId unit = layout_.block(BlockId{index}).unit;
  // No gradient of a unit without uses in backward arrives; the norm ends the wait for one.
  const std::uint64_t steps_drained = is_eager(index) ? units_[index_of(unit)].drained_steps : 0;
  return std::max(steps_drained, normed_steps_) >= blocks_[index].grants;
}

// Reads into the lane, once the gradients are final.
void SimulatedPass::load_gradients(std::uint32_t index) {
  Block& block = blocks_[index];
  if (!block.awaits_gradients || !may_update(index)) return;
  block.awaits_gradients = false;
  const SimulatedJob job{SimulatedTask::kLoad, index, ranked(1, 3 * block.place + 2)};
  const BlockId id{index};
  if (gradient_tier(index) == Tier::kNvme) {
    machine_.read(job, layout_.gradient_slot_bytes(id));
  } else {
    machine_.copy_down(job, layout_.block(id).element_count * layout_.format().gradient_bytes());
  }
}

void SimulatedPass::note_if_ready(std::uint32_t index) {
  Block& block = blocks_[index];
  load_gradients(index);
  if (!block.is_loaded || !may_update(index) || commits_.is_saving(index)) return;
  block.is_loaded = false;
  block.is_ready = true;
  ready_places_.push(block.place);
  ready_blocks_.push((block.grants - 1) * blocks_.size() + index);
}

// In the order of their turns until the norm is known, then in unit order: forward is about to need
// the blocks that are left at the turn from backward to forward.
bool SimulatedPass::pump_adam() {
  if (!may_start_update()) return false;
  const auto count = blocks_.size();
  const auto drop = [](Queue& queue, auto&& is_ready) {
    while (!queue.empty() && !is_ready(queue.top())) queue.pop();
  };
  drop(ready_places_, [&](std::uint64_t place) {
    const Block& block = blocks_[block_at_place_[place % count]];
    return block.is_ready && block.place == place;
  });
  if (ready_places_.empty()) return false;
  auto index = block_at_place_[ready_places_.top() % count];
  if (ready_places_.top() / trained_blocks_ < normed_steps_) {
    drop(ready_blocks_, [&](std::uint64_t turn) {
      const Block& block = blocks_[turn % count];
      return block.is_ready && block.grants - 1 == turn / count;
    });
    index = static_cast<std::uint32_t>(ready_blocks_.top() % count);
  }
  blocks_[index].is_ready = false;
  start_update(index);
  return true;
}

void SimulatedPass::start_update(std::uint32_t index) {
  if (!placement_.streams_updates)
    return machine_.adam({SimulatedTask::kAdam, index, ranked(1, 0)},
                         layout_.block(BlockId{index}).element_count);
  --staging_free_;
  machine_.copy_up({SimulatedTask::kStreamUp, index, ranked(1, blocks_[index].place)},
                   streamed_bytes(index, /*with_gradients=*/true));
}

// The bytes that come for an update on the device, or go back after it.
std::uint64_t SimulatedPass::streamed_bytes(std::uint32_t index, bool with_gradients) const {
  const BlockId id{index};
  const bool goes_up = with_gradients;
  std::uint64_t bytes = layout_.record_bytes(id);
  if (parameter_tier(index) != Tier::kDevice &&
      !(goes_up && layout_.format().master == MasterLayout::kFp16))
    bytes += layout_.parameter_bytes(id);
  if (with_gradients && gradient_tier(index) != Tier::kDevice)
    bytes += layout_.block(id).element_count * layout_.format().gradient_bytes();
  return bytes;
}

void SimulatedPass::stream_back(std::uint32_t index) {
  machine_.copy_down({SimulatedTask::kStreamDown, index, ranked(2, blocks_[index].place)},
                     streamed_bytes(index, /*with_gradients=*/false));
}

void SimulatedPass::end(const SimulatedJob& job) {
  const auto index = static_cast<std::uint32_t>(job.subject);
  switch (job.task) {
    case SimulatedTask::kLoad: return part_loaded(index);
    case SimulatedTask::kAdam: return updated(index);
    case SimulatedTask::kStreamUp:
      return machine_.device_adam(
          {SimulatedTask::kStreamAdam, index, ranked(1, blocks_[index].place)},
          layout_.block(BlockId{index}).element_count);
    case SimulatedTask::kStreamAdam: return stream_back(index);
    case SimulatedTask::kStreamDown: ++staging_free_; return updated(index);
    case SimulatedTask::kDeviceAdam:
      ++updated_on_device_;
      publish(index);
      return commits_.updated(index, blocks_[index].updates);
    case SimulatedTask::kPublish: publish(index); return part_home(index);
    default: return part_home(index);
  }
}

void SimulatedPass::updated(std::uint32_t index) {
  Block& block = blocks_[index];
  const BlockId id{index};
  block.pending = 1;  // held until every part has been sent
  if (parameter_tier(index) == Tier::kDevice && needs_slot(index)) {
    ++block.pending;
    machine_.copy_up({SimulatedTask::kPublish, index, ranked(1, block.place)},
                     layout_.parameter_bytes(id));
  } else {
    publish(index);
  }
  const bool is_written = record_tier(index) == Tier::kNvme || parameter_tier(index) == Tier::kNvme;
  if (!is_written || commits_.may_store(block.grants)) return write_back(index);
  waiting_writes_.push_back(index);
}

bool SimulatedPass::pump_writes() {
  if (waiting_writes_.empty()) return false;
  const std::uint32_t index = waiting_writes_.front();
  if (!commits_.may_store(blocks_[index].grants)) return false;
  waiting_writes_.pop_front();
  write_back(index);
  return true;
}

void SimulatedPass::write_back(std::uint32_t index) {
  Block& block = blocks_[index];
  const BlockId id{index};
  if (record_tier(index) == Tier::kNvme) {
    ++block.pending;
    machine_.write({SimulatedTask::kWriteBack, index, ranked(2, 2 * block.place)},
                   layout_.record_slot_bytes(id));
  }
  if (parameter_tier(index) == Tier::kNvme) {
    ++block.pending;
    machine_.write({SimulatedTask::kWriteBack, index, ranked(2, 2 * block.place + 1)},
                   layout_.parameter_slot_bytes(id));
  }
  part_home(index);
}

void SimulatedPass::publish(std::uint32_t index) {
  ++blocks_[index].updates;
  ++units_[index_of(layout_.block(BlockId{index}).unit)].updates;
}

void SimulatedPass::part_home(std::uint32_t index) {
  Block& block = blocks_[index];
  if (--block.pending != 0) return;
  block.in_pass = false;
  if (needs_slot(index)) come_home_.push_back(index);
  if (needs_lane(index)) ++lanes_free_;
  ++home_;
  commits_.updated(index, block.grants);
}

}  // namespace sluice
