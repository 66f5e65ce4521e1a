#include "engine/bound_simulation.h"

#include <algorithm>
#include <deque>

#include "base/error.h"
#include "engine/simulated_pass.h"

namespace sluice {
namespace {

constexpr std::uint64_t kWarmSteps = 3;
constexpr std::uint64_t kCountedSteps = 4;
constexpr std::uint64_t kSteps = kWarmSteps + kCountedSteps;

class Simulation final : public ParameterSource {
 public:
  Simulation(const StepShape& shape, OverlapPolicy policy)
      : layout_(shape.layout),
        placement_(shape.placement),
        schedule_(shape.schedule),
        window_(shape.window),
        rates_(shape.rates),
        policy_(policy),
        machine_(shape.rates, [this](const SimulatedJob& job) { end(job); }),
        pass_(shape, policy, machine_, *this),
        last_fetch_(layout_.units().size(), kNoUse),
        in_window_(layout_.units().size(), false),
        uses_(schedule_.size()),
        staging_free_(placement_.prefetch_slots()),
        gradient_slots_free_(placement_.gradient_slots.count) {
    for (std::uint32_t use = 0; use < schedule_.size(); ++use) {
      if (window_.uses[use].fetch) last_fetch_[index_of(schedule_[use].unit)] = use;
      if (schedule_[use].final_gradient) ++final_uses_;
    }
  }

  StepCost run() {
    pump();
    while (step_ < kWarmSteps) advance();
    const StepCost begin = machine_.account();
    while (step_ < kSteps) advance();
    return mean_since(begin);
  }

  bool fetch_is_to_come(std::uint32_t block, std::uint64_t pass) const override;
  bool is_in_window(std::uint32_t unit, std::uint64_t pass) const override {
    return pass == step_ && in_window_[unit];
  }

 private:
  static constexpr std::uint32_t kNoUse = UINT32_MAX;

  struct Use {
    std::uint32_t blocks_copied = 0;
    bool is_computed = false;
  };
  struct Fetch {
    std::uint32_t use = 0;
    std::uint32_t block = 0;
    bool has_arrived = false;
    bool is_staged = false;
  };

  void advance() {
    machine_.advance();
    pump();
  }
  // Starts whatever may start.
  void pump() {
    while (pump_step() || pump_fetch() || pump_copy() || pump_compute() || pass_.pump() ||
           pass_.pump_adam()) {
    }
  }
  void end(const SimulatedJob& job);
  bool pump_step();
  bool pump_fetch();
  bool pump_copy();
  bool pump_compute();
  void fetch_arrived(std::uint64_t number);
  void copied();
  void computed(std::uint32_t use);
  void drained(std::uint32_t use);
  void gradient_added(std::uint32_t use);
  StepCost mean_since(const StepCost& begin) const;
  std::uint64_t elements_of(std::uint32_t use) const {
    return layout_.unit(schedule_[use].unit).element_count;
  }

  const Layout& layout_;
  const Placement& placement_;
  const Schedule& schedule_;
  const WindowPlan& window_;
  const Rates& rates_;
  const OverlapPolicy policy_;
  SimulatedMachine machine_;
  SimulatedPass pass_;
  std::vector<std::uint32_t> last_fetch_;  // by unit: the last use that fetches it
  std::uint32_t final_uses_ = 0;

  // The step that computation is in.
  std::uint64_t step_ = 0;
  std::vector<bool> in_window_;  // by unit: wholly there, with this step's parameters
  std::vector<Use> uses_;
  std::uint32_t fetch_use_ = 0;    // what is fetched next
  std::uint32_t fetch_block_ = 0;  // in its unit
  std::uint32_t next_compute_ = 0;
  bool is_computing_ = false;
  std::uint32_t normed_uses_ = 0;

  std::deque<Fetch> fetches_;  // begun and not on the device
  std::uint64_t first_fetch_ = 0;
  bool is_copying_ = false;
  std::uint32_t staging_free_;
  std::uint32_t gradient_slots_free_;
};

void Simulation::end(const SimulatedJob& job) {
  const auto use = static_cast<std::uint32_t>(job.subject);
  switch (job.task) {
    case SimulatedTask::kFetch: return fetch_arrived(job.subject);
    case SimulatedTask::kCopyUp: return copied();
    case SimulatedTask::kCompute: return computed(use);
    case SimulatedTask::kDrain: return drained(use);
    case SimulatedTask::kAccumulate: return gradient_added(use);
    case SimulatedTask::kNorm:
      if (++normed_uses_ == final_uses_) pass_.norm_known(step_);
      return;
    default: return pass_.end(job);
  }
}

// The next step begins as soon as it may.
bool Simulation::pump_step() {
  const bool is_over = policy_ == OverlapPolicy::kSerial
                           ? pass_.home() == (step_ + 1) * layout_.blocks().size()
                           : normed_uses_ == final_uses_;
  if (!is_over || step_ == kSteps) return false;
  ++step_;
  in_window_.assign(in_window_.size(), false);
  uses_.assign(uses_.size(), {});
  fetch_use_ = 0;
  fetch_block_ = 0;
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
  const bool is_staged = placement_.parameter_tier[block] == Tier::kNvme;
  if (pass_.updates(block) < step_ || (is_staged && staging_free_ == 0)) return false;
  const std::uint64_t number = first_fetch_ + fetches_.size();
  fetches_.push_back({.use = fetch_use_, .block = block, .is_staged = is_staged});
  ++fetch_block_;
  if (is_staged) --staging_free_;
  if (is_staged && !pass_.is_in_lane(block)) {
    machine_.read({SimulatedTask::kFetch, number, ranked(0, number)},
                  layout_.parameter_slot_bytes(BlockId{block}));
  } else {
    fetch_arrived(number);
  }
  return true;
}

void Simulation::fetch_arrived(std::uint64_t number) {
  Fetch& fetch = fetches_[number - first_fetch_];
  fetch.has_arrived = true;
  pass_.fetch_arrived(fetch.block);
}

// A fetch with the parameters of step `pass` that has not arrived.
bool Simulation::fetch_is_to_come(std::uint32_t block, std::uint64_t pass) const {
  const UnitPlace& unit = layout_.unit(layout_.block(BlockId{block}).unit);
  const std::uint32_t last = last_fetch_[index_of(unit.id)];
  if (last == kNoUse || step_ > pass) return false;
  if (step_ < pass || fetch_use_ < last) return true;
  if (fetch_use_ == last && fetch_block_ <= block - unit.first_block) return true;
  return std::ranges::any_of(fetches_, [&](const Fetch& fetch) {
    return fetch.block == block && fetch.use == last && !fetch.has_arrived;
  });
}

// In schedule order, and not before computation has left the place.
bool Simulation::pump_copy() {
  if (is_copying_ || fetches_.empty() || !fetches_.front().has_arrived) return false;
  const Fetch& fetch = fetches_.front();
  const auto& evicted_uses = window_.uses[fetch.use].evicted_uses;
  const auto is_computed = [&](std::uint32_t use) { return uses_[use].is_computed; };
  if (!std::ranges::all_of(evicted_uses, is_computed)) return false;
  for (const std::uint32_t use : evicted_uses) in_window_[index_of(schedule_[use].unit)] = false;
  is_copying_ = true;
  machine_.copy_up({SimulatedTask::kCopyUp, 0, ranked(0, 0)},
                   layout_.parameter_bytes(BlockId{fetch.block}));
  return true;
}

void Simulation::copied() {
  const Fetch fetch = fetches_.front();
  fetches_.pop_front();
  ++first_fetch_;
  is_copying_ = false;
  if (fetch.is_staged) ++staging_free_;
  const UnitPlace& unit = layout_.unit(schedule_[fetch.use].unit);
  in_window_[index_of(unit.id)] = ++uses_[fetch.use].blocks_copied == unit.block_count;
}

bool Simulation::pump_compute() {
  if (is_computing_ || next_compute_ == schedule_.size()) return false;
  const std::uint32_t use = next_compute_;
  const UnitPlace& unit = layout_.unit(schedule_[use].unit);
  const bool is_backward = schedule_[use].pass == Pass::kBackward;
  if (window_.uses[use].fetch && uses_[use].blocks_copied < unit.block_count) return false;
  // For units at home on the device, which nobody fetches.
  if (!pass_.has_updated(unit.id, step_)) return false;
  if (is_backward && gradient_slots_free_ == 0) return false;
  if (is_backward) --gradient_slots_free_;
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
  if (schedule_[use].pass != Pass::kBackward) return;
  machine_.copy_down({SimulatedTask::kDrain, use, ranked(0, use)},
                     layout_.unit_gradient_bytes(schedule_[use].unit));
}

void Simulation::drained(std::uint32_t use) {
  ++gradient_slots_free_;
  if (schedule_[use].first_gradient) return gradient_added(use);
  machine_.norm({SimulatedTask::kAccumulate, use, ranked(0, use)}, elements_of(use));
}

void Simulation::gradient_added(std::uint32_t use) {
  if (!schedule_[use].final_gradient) return;
  machine_.norm({SimulatedTask::kNorm, use, ranked(0, use)}, elements_of(use));
  pass_.gradient_final(schedule_[use].unit, step_);
}

StepCost Simulation::mean_since(const StepCost& begin) const {
  constexpr auto kCounted = static_cast<double>(kCountedSteps);
  StepCost mean = machine_.account();
  mean.step_s = (mean.step_s - begin.step_s) / kCounted;
  for (std::size_t i = 0; i < kResourceCount; ++i)
    mean.busy_s[i] = (mean.busy_s[i] - begin.busy_s[i]) / kCounted;
  Traffic& traffic = mean.traffic;
  traffic.nvme_read_bytes =
      (traffic.nvme_read_bytes - begin.traffic.nvme_read_bytes) / kCountedSteps;
  traffic.nvme_write_bytes =
      (traffic.nvme_write_bytes - begin.traffic.nvme_write_bytes) / kCountedSteps;
  return mean;
}

}  // namespace

StepCost simulate_steps(const StepShape& shape, OverlapPolicy policy) {
  SLUICE_CHECK(policy != OverlapPolicy::kAuto, "a bound is that of a policy");
  SLUICE_CHECK(shape.rates.units.size() == shape.layout.units().size(),
               "each unit's computation takes a stated time");
  return Simulation(shape, policy).run();
}

}  // namespace sluice
