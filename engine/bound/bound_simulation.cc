#include "engine/bound/bound_simulation.h"

#include <algorithm>
#include <deque>

#include <sluice/error.h>
#include "engine/bound/simulated_commits.h"
#include "engine/bound/simulated_pass.h"
#include "engine/bound/simulated_spill.h"

namespace sluice {
namespace {

constexpr std::uint64_t kWarmSteps = 3;
constexpr std::uint64_t kCountedSteps = 4;
// With more updates from commit to commit, a simulation would take too long.
constexpr std::uint32_t kCommitEveryMax = 4;

// Whole rounds from commit to commit; the first rounds run ahead of their commits.
std::uint64_t warm_steps(const StepShape& shape) {
  return shape.commit_every == 1 ? kWarmSteps : kWarmSteps * shape.commit_every;
}
std::uint64_t counted_steps(const StepShape& shape) {
  return shape.commit_every == 1 ? kCountedSteps : 2 * shape.commit_every;
}

StepShape with_commits(const StepShape& shape, std::uint32_t commit_every) {
  return {shape.layout, shape.placement,   shape.schedule, shape.window,
          shape.rates,  shape.activations, commit_every};
}

// The cost of which `share` of the steps have that of `a`, and the rest that of `b`.
StepCost mixed(const StepCost& a, const StepCost& b, double share) {
  const auto mix = [&](auto of_a, auto of_b) {
    return static_cast<decltype(of_a)>(share * static_cast<double>(of_a) +
                                       (1 - share) * static_cast<double>(of_b));
  };
  StepCost cost = a;
  cost.step_s = mix(a.step_s, b.step_s);
  for (std::size_t i = 0; i < kResourceCount; ++i) cost.busy_s[i] = mix(a.busy_s[i], b.busy_s[i]);
  cost.traffic.nvme_read_bytes = mix(a.traffic.nvme_read_bytes, b.traffic.nvme_read_bytes);
  cost.traffic.nvme_write_bytes = mix(a.traffic.nvme_write_bytes, b.traffic.nvme_write_bytes);
  return cost;
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
        machine_(shape.rates, [this](const SimulatedJob& job) { end(job); }),
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
        uses_(schedule_.size()),
        gradient_slots_free_(placement_.gradient_slots.count) {
    for (std::uint32_t use = 0; use < schedule_.size(); ++use) {
      if (schedule_[use].final_gradient) ++final_uses_;
    }
  }

  StepCost run() {
    pump();
    while (step_ < warm_steps_) advance();
    const StepCost begin = machine_.account();
    while (step_ < warm_steps_ + counted_steps_) advance();
    return mean_since(begin);
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

  void advance() {
    machine_.advance();
    pump();
  }
  // Starts everything that may start.
  void pump() {
    while (pass_.settle() || slots_.settle() || pump_step() || pump_fetch() || pump_copy() ||
           pump_compute() || spill_.pump() || commits_.pump() || pass_.pump_writes() ||
           pass_.pump() || pass_.pump_adam()) {
    }
  }
  void end(const SimulatedJob& job);
  bool pump_step();
  bool pump_fetch();
  bool pump_copy();
  std::uint32_t ready_uses();
  bool pump_compute();
  void copied();
  void computed(std::uint32_t use);
  void drain(std::uint32_t use);
  void drained(std::uint32_t use);
  void gradient_added(std::uint32_t use);
  void gradient_home(std::uint32_t use);
  void normed();
  StepCost mean_since(const StepCost& begin) const;
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
  std::uint32_t final_uses_ = 0;

  // The step that computation is in.
  std::uint64_t step_ = 0;
  std::vector<Use> uses_;
  std::uint32_t fetch_use_ = 0;    // the next fetch
  std::uint32_t fetch_block_ = 0;  // in its unit
  std::uint32_t ready_uses_ = 0;   // whose leases are sure to end
  std::uint32_t next_compute_ = 0;
  bool is_computing_ = false;
  std::uint32_t normed_uses_ = 0;

  std::deque<Fetch> fetches_;      // begun, not on the device yet
  std::size_t ready_fetches_ = 0;  // of these, from the front on, already in host memory
  std::uint64_t fetched_ = 0;
  bool is_copying_ = false;
  std::uint32_t gradient_slots_free_;
};

void Simulation::end(const SimulatedJob& job) {
  const auto use = static_cast<std::uint32_t>(job.subject);  // or block
  switch (job.task) {
    case SimulatedTask::kFetch: slots_.set_valid(use); return pass_.slot_filled(use);
    case SimulatedTask::kCopyUp: return copied();
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
  uses_.assign(uses_.size(), {});
  fetch_use_ = 0;
  fetch_block_ = 0;
  ready_uses_ = 0;
  next_compute_ = 0;
  normed_uses_ = 0;
  return true;
}

bool Simulation::pump_fetch() {
  if (fetch_use_ == schedule_.size()) return false;
  const auto blocks = layout_.blocks_of(schedule_[fetch_use_].unit);
  if (!window_.uses[fetch_use_].fetch || fetch_block_ == blocks.size()) {
    ++fetch_use_;
    fetch_block_ = 0;
    return true;
  }
  const std::uint32_t block = index_of(blocks[fetch_block_].id);
  if (pass_.updates(block) < step_) return false;
  const auto is_released = [ready = ready_uses()](std::uint32_t use) { return use < ready; };
  if (!std::ranges::all_of(window_.uses[fetch_use_].evicted_uses, is_released)) return false;
  if (is_slotted(block)) {
    const bool is_bound = slots_.is_bound(block);
    if (!slots_.take(block, SimulatedUser::kFetch)) return false;
    if (!is_bound)
      machine_.read({SimulatedTask::kFetch, block, ranked(0, fetched_++)},
                    layout_.parameter_slot_bytes(BlockId{block}));
  }
  fetches_.push_back({.use = fetch_use_, .block = block});
  ++fetch_block_;
  return true;
}

// Leases end in order, each when its unit's copies are sure to come. Returns how many uses, from
// the first on, have their units in host memory, or at home on the device with their updates. If
// fetches went past a unit that waits for its update, they could take the slots that the update
// needs, and wait for that unit themselves.
std::uint32_t Simulation::ready_uses() {
  while (ready_fetches_ < fetches_.size() && has_arrived(fetches_[ready_fetches_].block))
    ++ready_fetches_;
  const std::uint32_t arrived_uses =
      ready_fetches_ < fetches_.size() ? fetches_[ready_fetches_].use : fetch_use_;
  while (ready_uses_ < arrived_uses && pass_.has_updated(schedule_[ready_uses_].unit, step_))
    ++ready_uses_;
  return ready_uses_;
}

// In schedule order, and only after computation has left the place.
bool Simulation::pump_copy() {
  if (is_copying_ || fetches_.empty()) return false;
  const Fetch& fetch = fetches_.front();
  if (!has_arrived(fetch.block)) return false;
  const auto& evicted_uses = window_.uses[fetch.use].evicted_uses;
  const auto is_computed = [&](std::uint32_t use) { return uses_[use].is_computed; };
  if (!std::ranges::all_of(evicted_uses, is_computed)) return false;
  if (placement_.parameter_tier[fetch.block] == Tier::kDevice) {  // gathered in place
    copied();
    return true;
  }
  is_copying_ = true;
  machine_.copy_up({SimulatedTask::kCopyUp, 0, ranked(0, 0)},
                   layout_.parameter_bytes(BlockId{fetch.block}));
  return true;
}

void Simulation::copied() {
  const Fetch fetch = fetches_.front();
  fetches_.pop_front();
  if (ready_fetches_ > 0) --ready_fetches_;
  is_copying_ = false;
  ++uses_[fetch.use].blocks_copied;
  // Parameters fetched for the last time stay for the update, if that may begin before the norm.
  const bool updates_early =
      policy_ == OverlapPolicy::kEager || policy_ == OverlapPolicy::kSpeculative;
  if (is_slotted(fetch.block))
    slots_.leave(fetch.block, SimulatedUser::kFetch,
                 updates_early && schedule_[fetch.use].final_gradient);
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

StepCost Simulation::mean_since(const StepCost& begin) const {
  const auto counted = static_cast<double>(counted_steps_);
  StepCost mean = machine_.account();
  mean.step_s = (mean.step_s - begin.step_s) / counted;
  for (std::size_t i = 0; i < kResourceCount; ++i)
    mean.busy_s[i] = (mean.busy_s[i] - begin.busy_s[i]) / counted;
  Traffic& traffic = mean.traffic;
  traffic.nvme_read_bytes =
      (traffic.nvme_read_bytes - begin.traffic.nvme_read_bytes) / counted_steps_;
  traffic.nvme_write_bytes =
      (traffic.nvme_write_bytes - begin.traffic.nvme_write_bytes) / counted_steps_;
  return mean;
}

}  // namespace

StepCost simulate_steps(const StepShape& shape, OverlapPolicy policy) {
  SLUICE_CHECK(policy != OverlapPolicy::kAuto, "a bound is that of a policy");
  SLUICE_CHECK(shape.rates.units.size() == shape.layout.units().size(),
               "each unit's computation takes a stated time");
  if (shape.placement.durable_copies == 0) return Simulation(with_commits(shape, 1), policy).run();
  if (shape.commit_every <= kCommitEveryMax) return Simulation(shape, policy).run();
  Placement scratch = shape.placement;
  scratch.durable_copies = 0;
  const StepShape bare{shape.layout, scratch,     shape.schedule,
                       shape.window, shape.rates, shape.activations};
  return mixed(Simulation(with_commits(shape, kCommitEveryMax), policy).run(),
               Simulation(bare, policy).run(),
               static_cast<double>(kCommitEveryMax) / shape.commit_every);
}

}  // namespace sluice
