#include "engine/bound/simulated_spill.h"

#include <utility>

namespace sluice {

SimulatedSpill::SimulatedSpill(const StepShape& shape, SimulatedMachine& machine,
                               Callbacks callbacks)
    : layout_(shape.layout),
      placement_(shape.placement),
      schedule_(shape.schedule),
      machine_(machine),
      callbacks_(std::move(callbacks)),
      staging_free_(shape.placement.gradient_staging.count),
      pending_(shape.layout.blocks().size(), 0) {}

// After everything else of the same urgency, in the order of uses and blocks.
std::uint64_t SimulatedSpill::place_of(std::uint32_t block) const {
  return std::uint64_t{1} << 55 | std::uint64_t{uses_.front()} << 28 | block;
}

bool SimulatedSpill::pump() {
  if (uses_.empty()) return false;
  const UnitPlace& unit = layout_.unit(schedule_[uses_.front()].unit);
  if (!placement_.gradient_spills(unit.id)) {
    if (std::exchange(started_, 1) != 0) return false;
    callbacks_.on_host(uses_.front());
    return true;
  }
  const bool adds_up = adds();
  const std::uint32_t slots = adds_up ? 2 : 1;
  if (started_ == unit.block_count || staging_free_ < slots) return false;
  const std::uint32_t block = unit.first_block + started_++;
  const BlockId id{block};
  const std::uint64_t copy_bytes =
      layout_.block(id).element_count * layout_.format().gradient_bytes();
  staging_free_ -= slots;
  pending_[block] = slots;
  const std::uint64_t place = place_of(block);
  // Where nothing takes time, the block is home, and the use over, when the last call returns.
  machine_.copy_down({SimulatedTask::kSpillCopy, block, ranked(0, place)}, copy_bytes);
  if (adds_up)
    machine_.read({SimulatedTask::kSpillSum, block, ranked(1, place)},
                  layout_.gradient_slot_bytes(id));
  return true;
}

void SimulatedSpill::end(const SimulatedJob& job) {
  const auto block = static_cast<std::uint32_t>(job.subject);
  const BlockId id{block};
  const UnitPlace& unit = layout_.unit(layout_.block(id).unit);
  switch (job.task) {
    case SimulatedTask::kSpillCopy:
      if (++left_ == unit.block_count) callbacks_.on_left(uses_.front());
      return part_arrived(block);
    case SimulatedTask::kSpillSum: return part_arrived(block);
    case SimulatedTask::kSpillAdd:
      if (adds()) ++staging_free_;
      return machine_.write({SimulatedTask::kSpillStore, block, ranked(2, place_of(block))},
                            layout_.gradient_slot_bytes(id));
    default: break;
  }
  ++staging_free_;
  if (++home_ != unit.block_count) return;
  const std::uint32_t use = uses_.front();
  next_use();
  callbacks_.on_home(use);
}

void SimulatedSpill::add_to(SimulatedState& state) const {
  for (const std::uint32_t use : uses_) state.add(use);
  for (const std::uint32_t count : {started_, left_, home_, staging_free_}) state.add(count);
  for (const std::uint32_t parts : pending_) state.add(parts);
}

void SimulatedSpill::host_ended() {
  if (!uses_.empty()) next_use();
}

void SimulatedSpill::next_use() {
  uses_.pop_front();
  started_ = left_ = home_ = 0;
}

// The addition and the norm each go through the block once.
void SimulatedSpill::part_arrived(std::uint32_t block) {
  if (--pending_[block] != 0) return;
  const std::uint64_t elements = layout_.block(BlockId{block}).element_count;
  machine_.norm({SimulatedTask::kSpillAdd, block, ranked(0, place_of(block))},
                adds() ? 2 * elements : elements);
}

}  // namespace sluice
