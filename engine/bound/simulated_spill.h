// Simulates the gradient drain of a step for the bound. Some gradients of the step stay on storage
// until the update. The uses drain their gradients one after another. A gradient that waits on
// storage is written block by block, through the staging slots. The engine's code for these writes
// is in engine/flow/gradient_spill.h.
//
// Thread rule: only one thread uses an object, because each object belongs to one simulation.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "engine/bound/simulated_machine.h"
#include "engine/bound/simulated_state.h"

namespace sluice {

class SimulatedSpill {
 public:
  // `on_host` is called if the next gradient to drain waits in host memory. `on_left` is called
  // when a gradient that waits on storage has left its slot. `on_home` is called when the whole
  // gradient of a use is on storage and is included in the norm.
  struct Callbacks {
    std::function<void(std::uint32_t use)> on_host;
    std::function<void(std::uint32_t use)> on_left;
    std::function<void(std::uint32_t use)> on_home;
  };
  // All arguments must outlive the object.
  SimulatedSpill(const StepShape& shape, SimulatedMachine& machine, Callbacks callbacks);

  void add(std::uint32_t use) { uses_.push_back(use); }
  // The call records that a gradient has arrived in host memory. The gradient belongs to the use
  // that was named in the last call of on_host.
  void host_ended();
  // Starts work on one block if the work can begin now.
  bool pump();
  // Ends a job that works on one block. SimulatedJob::subject is the number of the block.
  void end(const SimulatedJob& job);

  void add_to(SimulatedState& state) const;

 private:
  bool adds() const { return !schedule_[uses_.front()].first_gradient; }
  void part_arrived(std::uint32_t block);
  std::uint64_t place_of(std::uint32_t block) const;
  void next_use();

  const Layout& layout_;
  const Placement& placement_;
  const Schedule& schedule_;
  SimulatedMachine& machine_;
  Callbacks callbacks_;

  std::deque<std::uint32_t> uses_;  // the uses with gradients to drain, in order
  std::uint32_t started_ = 0;       // blocks of the first use in uses_
  std::uint32_t left_ = 0;
  std::uint32_t home_ = 0;
  std::uint32_t staging_free_;
  std::vector<std::uint32_t> pending_;  // by block: parts that have not arrived
};

}  // namespace sluice
