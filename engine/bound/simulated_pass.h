// Simulates the optimizer pass for the bound. For each block, the simulation computes the times of
// the turn, the lane, the reads, the Adam update and the writes. The rules are in
// engine/bound/bound_simulation.h.
//
// Thread rule: one thread, because one simulation owns the object.
// Progress: a block in the pass waits for its own jobs, for the arrival of its parameters in its
// slot, and for its gradient or the norm. A block's jobs, parameters and gradient never wait for a
// lane of the same pass or of a later pass.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <queue>
#include <vector>

#include "engine/bound/simulated_commits.h"
#include "engine/bound/simulated_machine.h"
#include "engine/bound/simulated_slots.h"
#include "engine/bound/simulated_state.h"

namespace sluice {

class SimulatedPass {
 public:
  // All arguments must outlive the pass.
  SimulatedPass(const StepShape& shape, OverlapPolicy policy, SimulatedMachine& machine,
                SimulatedSlots& slots, SimulatedCommits& commits);

  // If a lane's block has reached its home at this instant, the call frees the lane's slot. Returns
  // false if there is no such lane.
  bool settle();
  // Gives one block its turn, if a block may have its turn now.
  bool pump();
  // Starts the writes of a block that has waited for a commit, if these writes may start now.
  bool pump_writes();
  // The call records that a commit has saved the block. The block may then be updated again.
  void saved(std::uint32_t block);
  // Starts the next update of a block in a lane, if possible. The function is called only when no
  // other job can start.
  bool pump_adam();

  // The call records that the block's parameters have arrived in its slot.
  void slot_filled(std::uint32_t block);
  void gradient_final(UnitId unit, std::uint64_t step);
  void norm_known(std::uint64_t step);
  // Ends a job that works on one block. SimulatedJob::subject is the number of the block.
  void end(const SimulatedJob& job);

  // Returns the number of the block's updates that are visible to fetches and to computation on the
  // device.
  std::uint64_t updates(std::uint32_t block) const { return blocks_[block].updates; }
  bool has_updated(UnitId unit, std::uint64_t steps) const;
  // Returns whether the results of `steps` updates of every block have reached the blocks' homes.
  bool is_home(std::uint64_t steps) const {
    return home_ == steps * trained_blocks_ && updated_on_device_ == steps * device_blocks_;
  }

  // The function is called when step `step` begins, and adds the state of the pass to `state`.
  // Requires: no lane's block has reached its home at this instant, and no store waits for a
  // commit.
  void add_to(SimulatedState& state, std::uint64_t step) const;

 private:
  struct Block {
    std::uint64_t updates = 0;  // UINT64_MAX for a block that is never updated
    std::uint64_t grants = 0;   // passes in which the block has had its turn
    std::uint64_t place = 0;    // the place of the block in the order of all passes
    std::uint32_t pending = 0;  // parts to read before Adam, or to write after Adam
    bool in_pass = false;
    bool awaits_slot = false;
    bool awaits_gradients = false;  // gradients do not wait in host memory, and may still change
    bool is_loaded = false;
    bool is_ready = false;     // waits only for the CPU
    bool awaits_save = false;  // the device updates the block after the commit's save
  };
  struct Unit {
    std::uint64_t drained_steps = 0;  // steps whose gradient is final
    std::uint64_t updates = 0;        // of all blocks
  };

  Tier parameter_tier(std::uint32_t block) const { return placement_.parameter_tier[block]; }
  Tier record_tier(std::uint32_t block) const { return placement_.record_tier[block]; }
  Tier gradient_tier(std::uint32_t block) const {
    return placement_.gradient_tier[index_of(layout_.block(BlockId{block}).unit)];
  }
  bool needs_lane(std::uint32_t block) const {
    return needs_slot(block) || record_tier(block) != Tier::kHost || fetches_gradients(block);
  }
  bool fetches_gradients(std::uint32_t block) const {
    return placement_.lane_fetches_gradients(layout_.block(BlockId{block}).unit);
  }
  bool is_eager(std::uint32_t block) const;
  bool grant_by_unit();
  bool grant_by_arrival();
  bool try_grant(std::uint32_t index);
  bool needs_slot(std::uint32_t block) const {
    return placement_.update_takes_slot(BlockId{block});
  }
  bool may_start_update() const {
    return placement_.streams_updates ? staging_free_ != 0 : machine_.cpu_is_free();
  }
  void start_update(std::uint32_t index);
  void stream_back(std::uint32_t index);
  std::uint64_t streamed_bytes(std::uint32_t index, bool with_gradients) const;
  void load_parameters(std::uint32_t index, bool is_bound);
  void part_loaded(std::uint32_t index);
  bool may_update(std::uint32_t index) const;
  void load_gradients(std::uint32_t index);
  void note_if_ready(std::uint32_t index);
  void updated(std::uint32_t index);
  void publish(std::uint32_t index);
  void update_on_device(UnitId unit);
  void update_on_device(const BlockPlace& block);
  void write_back(std::uint32_t index);
  void part_home(std::uint32_t index);

  const Layout& layout_;
  const Placement& placement_;
  const OverlapPolicy policy_;
  SimulatedMachine& machine_;
  SimulatedSlots& slots_;
  SimulatedCommits& commits_;
  std::deque<std::uint32_t> waiting_writes_;  // blocks whose stores wait for a commit
  std::vector<Block> blocks_;
  std::vector<Unit> units_;
  std::vector<UnitId> arrival_order_;
  const std::vector<bool> is_updated_;  // by unit: in each step
  std::uint64_t trained_blocks_ = 0;    // blocks that each pass updates, without device_blocks_
  std::uint64_t device_blocks_ = 0;

  std::uint64_t pass_ = 0;  // the step whose blocks have their turn
  std::uint64_t granted_ = 0;
  std::uint32_t lanes_free_;
  std::uint32_t staging_free_;       // places for blocks that the device updates
  std::uint32_t next_block_ = 0;     // in unit order
  std::uint32_t next_arrival_ = 0;   // the next unit, in order of arrival
  std::uint32_t arrival_block_ = 0;  // the next block of this unit
  std::uint64_t normed_steps_ = 0;   // steps whose norm is known

  // Both queues hold the blocks that wait only for the CPU. The first queue is in the order of
  // places in the pass, and the second queue is in the order of units. A block leaves through one
  // of the queues. The block's entry in the other queue is dropped when the entry reaches the
  // front.
  using Queue = std::priority_queue<std::uint64_t, std::vector<std::uint64_t>, std::greater<>>;
  Queue ready_places_;
  Queue ready_blocks_;
  std::vector<std::uint32_t> block_at_place_;  // by place in the pass
  std::uint64_t home_ = 0;                     // updates, of all blocks in the pass
  std::uint64_t sent_to_device_ = 0;           // updates, of all blocks that the device updates
  std::uint64_t updated_on_device_ = 0;        // how many of these are done
  std::vector<std::uint32_t> come_home_;       // blocks that still have their slots
};

}  // namespace sluice
