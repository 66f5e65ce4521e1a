#include "engine/bound/bound_simulation.h"

#include <algorithm>
#include <array>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include <sluice/error.h>
#include "engine/bound/simulated_commits.h"
#include "engine/bound/simulated_pass.h"
#include "engine/bound/simulated_spill.h"
#include "engine/bound/step_mean.h"
#include "engine/plan/commit_turn.h"

namespace sluice {
namespace {

constexpr std::uint64_t kWarmSteps = 3;
constexpr std::uint64_t kCountedSteps = 4;
// Whole rounds from commit to commit; the first rounds run ahead of their commits.
std::uint64_t warm_steps(const StepShape& shape) {
  return shape.commit_every == 1 ? kWarmSteps : kWarmSteps * shape.commit_every;
}
std::uint64_t counted_steps(const StepShape& shape) {
  return shape.commit_every == 1 ? kCountedSteps : 2 * shape.commit_every;
}

class Simulation {
 public:
  Simulation(const StepShape& shape, OverlapPolicy policy)
      : layout_(shape.layout),
        placement_(shape.placement),
        schedule_(shape.schedule),
        window_(shape.window),
        rates_(shape.rates),
        policy_(policy),
        machine_(shape, warm_steps(shape) + counted_steps(shape) + 1,
                 [this](const SimulatedJob& job) { end(job); }),
        slots_(placement_, layout_.blocks().size()),
        commits_(shape, machine_, [this](std::uint32_t block) { pass_.saved(block); }),
        pass_(shape, policy, machine_, slots_, commits_),
        spill_(shape, machine_,
               {.on_host = [this](std::uint32_t use) { drain(use); },
                .on_left = [this](std::uint32_t) { ++gradient_slots_free_; },
                .on_home = [this](std::uint32_t use) { gradient_home(use); }}),
        spills_(std::ranges::count(placement_.gradient_tier, Tier::kNvme) != 0),
        warm_steps_(warm_steps(shape)),
        counted_steps_(counted_steps(shape)),
        commit_turn_(uses_before_commit(schedule_, policy)),
        may_repeat_(placement_.durable_copies == 0 && rates_.write_cache_bytes == 0),
        announced_after_(shape.announced_after),
        uses_(schedule_.size()),
        gradient_slots_free_(placement_.gradient_slots.count) {
    for (std::uint32_t use = 0; use < schedule_.size(); ++use) {
      if (schedule_[use].final_gradient) ++final_uses_;
      lines_[is_announced(use) ? 0 : 1].uses.push_back(use);
    }
  }

  StepCost run() {
    pump();
    StepMean mean(warm_steps_, counted_steps_);
    for (std::uint64_t step = 1;; ++step) {
      while (step_ < step) advance();
      const auto known = may_repeat_ ? std::optional(state(step)) : std::nullopt;
      if (const auto found = mean.note(machine_.account(), known)) return *found;
    }
  }

 private:
  struct Use {
    std::uint32_t blocks_copied = 0;
    bool is_computed = false;
  };
  struct Fetch {
    std::uint32_t use = 0;
    std::uint32_t block = 0;
  };
  // The uses whose fetches follow each other.
  struct Line {
    std::vector<std::uint32_t> uses;
    std::size_t next = 0;     // the next fetch
    std::uint32_t block = 0;  // in its unit
    std::deque<Fetch> begun;  // not on the device yet
    std::size_t arrived = 0;  // of these, from the front on, already in host memory
    std::size_t ready = 0;    // of the uses, from the first on: their leases are sure to end
  };

  void advance() {
    machine_.advance();
    pump();
  }
  // Starts everything that may start.
  void pump() {
    while (pass_.settle() || slots_.settle() || pump_step() || pump_fetch() || pump_copy() ||
           pump_compute() || spill_.pump() || commits_.pump(held_commit()) || pass_.pump_writes() ||
           pass_.pump() || pass_.pump_adam()) {
    }
  }
  void end(const SimulatedJob& job);
  bool pump_step();
  bool pump_fetch() { return pump_fetch(lines_[0]) || pump_fetch(lines_[1]); }
  bool pump_fetch(Line& line);
  bool pump_copy() { return !is_copying_ && (pump_copy(lines_[0]) || pump_copy(lines_[1])); }
  bool pump_copy(Line& line);
  std::uint32_t first_missing();
  std::uint64_t held_commit();
  bool pump_compute();
  void copied(Line& line);
  void computed(std::uint32_t use);
  void drain(std::uint32_t use);
  void drained(std::uint32_t use);
  void gradient_added(std::uint32_t use);
  void gradient_home(std::uint32_t use);
  void normed();
  SimulatedState state(std::uint64_t step) const;
  bool is_announced(std::uint32_t use) const {
    return !announced_after_.empty() && announced_after_[use] != StepShape::kScheduled;
  }
  // Whether the step has announced the use, if it has to.
  bool is_known(std::uint32_t use) const {
    return !is_announced(use) || next_compute_ - (is_computing_ ? 1 : 0) >= announced_after_[use];
  }
  bool is_slotted(std::uint32_t block) const {
    return placement_.parameter_tier[block] == Tier::kNvme;
  }
  bool has_arrived(std::uint32_t block) const {
    return !is_slotted(block) || slots_.is_valid(block);
  }
  // Whether its gradient is computed straight in the set.
  bool is_in_set(std::uint32_t use) const {
    return placement_.leases_gradient_set && schedule_[use].first_gradient &&
           placement_.gradient_tier[index_of(schedule_[use].unit)] == Tier::kHost;
  }
  // The elements that this rank updates, and so fetches from the device once the ranks are summed.
  std::uint64_t elements_of(std::uint32_t use) const {
    return layout_.unit(schedule_[use].unit).shard_elements;
  }

  const Layout& layout_;
  const Placement& placement_;
  const Schedule& schedule_;
  const WindowPlan& window_;
  const Rates& rates_;
  const OverlapPolicy policy_;
  SimulatedMachine machine_;
  SimulatedSlots slots_;
  SimulatedCommits commits_;
  SimulatedPass pass_;
  SimulatedSpill spill_;
  const bool spills_;
  const std::uint64_t warm_steps_;
  const std::uint64_t counted_steps_;
  const std::uint32_t commit_turn_;
  const bool may_repeat_;  // commits and write caches have a state of their own
  std::uint32_t final_uses_ = 0;

  // The step that computation is in.
  std::uint64_t step_ = 0;
  const std::span<const std::uint32_t> announced_after_;
  std::vector<Use> uses_;
  std::array<Line, 2> lines_;  // announced uses, which go first, and the others
  std::uint32_t next_compute_ = 0;
  bool is_computing_ = false;
  std::uint32_t normed_uses_ = 0;
  std::uint64_t fetched_ = 0;
  Line* copying_ = nullptr;  // the line whose copy is under way
  bool is_copying_ = false;
  std::uint32_t gradient_slots_free_;
};

void Simulation::end(const SimulatedJob& job) {
  const auto use = static_cast<std::uint32_t>(job.subject);  // or block
  switch (job.task) {
    case SimulatedTask::kFetch: slots_.set_valid(use); return pass_.slot_filled(use);
    case SimulatedTask::kCopyUp: return copied(*copying_);
    case SimulatedTask::kCompute: return computed(use);
    case SimulatedTask::kDrain: return drained(use);
    case SimulatedTask::kAccumulate: return gradient_added(use);
    case SimulatedTask::kNorm: return normed();
    case SimulatedTask::kSpillCopy:
    case SimulatedTask::kSpillSum:
    case SimulatedTask::kSpillAdd:
    case SimulatedTask::kSpillStore: return spill_.end(job);
    case SimulatedTask::kSaveCopy:
    case SimulatedTask::kSave:
    case SimulatedTask::kFlush: return commits_.end(job);
    default: return pass_.end(job);
  }
}

// The next step begins as soon as it may.
bool Simulation::pump_step() {
  // Uses of frozen units may be left to compute when the norm is known.
  const bool is_computed = next_compute_ == schedule_.size() && !is_computing_;
  const bool is_over = is_computed && normed_uses_ == final_uses_ &&
                       (policy_ != OverlapPolicy::kSerial || pass_.is_home(step_ + 1));
  if (!is_over || step_ == warm_steps_ + counted_steps_) return false;
  ++step_;
  commits_.step_began();
  uses_.assign(uses_.size(), {});
  for (Line& line : lines_) line.next = line.ready = line.block = 0;
  next_compute_ = normed_uses_ = 0;
  return true;
}

bool Simulation::pump_fetch(Line& line) {
  if (line.next == line.uses.size() || !is_known(line.uses[line.next])) return false;
  const std::uint32_t use = line.uses[line.next];
  const auto blocks = layout_.blocks_of(schedule_[use].unit);
  if (!window_.uses[use].fetch || line.block == blocks.size()) {
    ++line.next;
    line.block = 0;
    return true;
  }
  const std::uint32_t block = index_of(blocks[line.block].id);
  if (pass_.updates(block) < step_) return false;
  const std::uint32_t missing = first_missing();
  const auto is_released = [missing](std::uint32_t evicted) { return evicted < missing; };
  if (!std::ranges::all_of(window_.uses[use].evicted_uses, is_released)) return false;
  if (is_slotted(block)) {
    const bool is_bound = slots_.is_bound(block);
    if (!slots_.take(block, SimulatedUser::kFetch)) return false;
    if (!is_bound)
      machine_.read({SimulatedTask::kFetch, block, ranked(0, fetched_++)},
                    layout_.parameter_slot_bytes(BlockId{block}));
  }
  line.begun.push_back({.use = use, .block = block});
  ++line.block;
  return true;
}

// Leases end in order. Returns the first use whose unit is neither in host memory nor at home on
// the device with its updates: fetches past it could take the slots that the updates need.
std::uint32_t Simulation::first_missing() {
  auto first = static_cast<std::uint32_t>(schedule_.size());
  for (Line& line : lines_) {
    while (line.arrived < line.begun.size() && has_arrived(line.begun[line.arrived].block))
      ++line.arrived;
    const auto use_at = [&](std::size_t number) {
      return number < line.uses.size() ? line.uses[number] : UINT32_MAX;
    };
    const std::uint32_t next =
        line.arrived < line.begun.size() ? line.begun[line.arrived].use : use_at(line.next);
    while (use_at(line.ready) < next &&
           pass_.has_updated(schedule_[use_at(line.ready)].unit, step_))
      ++line.ready;
    first = std::min(first, use_at(line.ready));
  }
  return first;
}

// The version whose commit waits for the step's fetches; UINT64_MAX: none.
std::uint64_t Simulation::held_commit() {
  return commits_.may_wait() && first_missing() < commit_turn_ ? step_ : UINT64_MAX;
}

// In the line's order, and only after computation has left the place.
bool Simulation::pump_copy(Line& line) {
  if (line.begun.empty()) return false;
  const Fetch& fetch = line.begun.front();
  if (!has_arrived(fetch.block)) return false;
  const auto& evicted_uses = window_.uses[fetch.use].evicted_uses;
  const auto is_computed = [&](std::uint32_t use) { return uses_[use].is_computed; };
  if (!std::ranges::all_of(evicted_uses, is_computed)) return false;
  if (placement_.parameter_tier[fetch.block] == Tier::kDevice) {  // gathered in place
    copied(line);
    return true;
  }
  is_copying_ = true;
  copying_ = &line;
  machine_.copy_up({SimulatedTask::kCopyUp, 0, ranked(0, 0)},
                   layout_.parameter_bytes(BlockId{fetch.block}));
  return true;
}

void Simulation::copied(Line& line) {
  const Fetch fetch = line.begun.front();
  line.begun.pop_front();
  if (line.arrived > 0) --line.arrived;
  is_copying_ = false;
  ++uses_[fetch.use].blocks_copied;
  // Parameters fetched for the last time stay for the update, if that may begin before the norm.
  const bool updates_early =
      policy_ == OverlapPolicy::kEager || policy_ == OverlapPolicy::kSpeculative;
  if (is_slotted(fetch.block))
    slots_.leave(fetch.block, SimulatedUser::kFetch,
                 updates_early && schedule_[fetch.use].final_gradient && !is_announced(fetch.use));
}

bool Simulation::pump_compute() {
  if (is_computing_ || next_compute_ == schedule_.size()) return false;
  const std::uint32_t use = next_compute_;
  const UnitPlace& unit = layout_.unit(schedule_[use].unit);
  const bool is_backward = schedule_[use].pass == Pass::kBackward;
  const bool has_gradient = is_backward && !unit.is_frozen;
  if (window_.uses[use].fetch && uses_[use].blocks_copied < unit.block_count) return false;
  // For units that are leased at home, which are never fetched.
  if (!pass_.has_updated(unit.id, step_)) return false;
  const bool takes_slot = has_gradient && !is_in_set(use);
  if (takes_slot && gradient_slots_free_ == 0) return false;
  if (takes_slot) --gradient_slots_free_;
  ++next_compute_;
  is_computing_ = true;
  const UnitTime& time = rates_.units[index_of(unit.id)];
  machine_.compute({SimulatedTask::kCompute, use, use},
                   is_backward ? time.backward_s : time.forward_s);
  return true;
}

void Simulation::computed(std::uint32_t use) {
  is_computing_ = false;
  uses_[use].is_computed = true;
  if (schedule_[use].pass != Pass::kBackward || layout_.unit(schedule_[use].unit).is_frozen) return;
  if (placement_.gradient_is_on_device(schedule_[use].unit)) {
    ++gradient_slots_free_;
    return gradient_home(use);
  }
  if (spills_) return spill_.add(use);
  drain(use);
}

void Simulation::drain(std::uint32_t use) {
  if (is_in_set(use)) return gradient_added(use);
  machine_.copy_down({SimulatedTask::kDrain, use, ranked(0, use)},
                     elements_of(use) * layout_.format().gradient_bytes());
}

void Simulation::drained(std::uint32_t use) {
  ++gradient_slots_free_;
  if (schedule_[use].first_gradient) return gradient_added(use);
  machine_.norm({SimulatedTask::kAccumulate, use, ranked(0, use)}, elements_of(use));
}

void Simulation::gradient_added(std::uint32_t use) {
  spill_.host_ended();
  if (!schedule_[use].final_gradient) return;
  if (!schedule_[use].first_gradient) return gradient_home(use);  // the addition takes the norm
  machine_.norm({SimulatedTask::kNorm, use, ranked(0, use)}, elements_of(use));
  pass_.gradient_final(schedule_[use].unit, step_);
}

void Simulation::gradient_home(std::uint32_t use) {
  if (!schedule_[use].final_gradient) return;
  pass_.gradient_final(schedule_[use].unit, step_);
  normed();
}

void Simulation::normed() {
  if (++normed_uses_ == final_uses_) pass_.norm_known(step_);
}

// At the end of `step` steps; more of them have ended where steps take no time.
SimulatedState Simulation::state(std::uint64_t step) const {
  SimulatedState state;
  state.add(step_ - step);
  for (const Use& use : uses_) state.add(std::uint64_t{use.blocks_copied} << 1 | use.is_computed);
  for (const Line& line : lines_) {
    for (const Fetch& fetch : line.begun) state.add(std::uint64_t{fetch.use} << 32 | fetch.block);
    for (const std::uint64_t place : {line.next, std::size_t{line.block}, line.arrived, line.ready})
      state.add(place);
  }
  state.add(copying_ == &lines_[0]);
  for (const std::uint32_t count : {next_compute_, normed_uses_, gradient_slots_free_,
                                    is_computing_ ? 1u : 0u, is_copying_ ? 1u : 0u})
    state.add(count);
  machine_.add_to(state);
  slots_.add_to(state);
  pass_.add_to(state, step_);
  spill_.add_to(state);
  return state;
}

}  // namespace

StepCost simulate_whole_commits(const StepShape& shape, OverlapPolicy policy) {
  SLUICE_CHECK(policy != OverlapPolicy::kAuto, "a bound is that of a policy");
  SLUICE_CHECK(shape.rates.units.size() == shape.layout.units().size(),
               "each unit's computation takes a stated time");
  return Simulation(shape, policy).run();
}

}  // namespace sluice
