// Steps whose uses are not those that the schedule expects.
#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "engine/plan/commit_turn.h"
#include "engine/plan/sharding.h"
#include "engine/step/step_loop.h"

namespace sluice {

// Where a step's gradients are reduced behind their last use, all ranks have to know which one that
// is before it comes.
void StepLoop::require_fixed_schedule() const {
  if (!ranks_.are_several() || cursor_.is_inference() ||
      reduces_each_use(ranks_.shard(), terms_.options().micro_batches, terms_.options().order))
    return;
  throw Error(ErrorCode::kUnsupported,
              fmt::format("the schedule expects {} next: with several ranks at sharding.stage 0 or "
                          "1, a step of {} micro-batches follows ModelSpec::forward_order and "
                          "backward_order; declare the order in use",
                          cursor_.describe(cursor_.next()), terms_.options().micro_batches));
}

// Computation leaves the schedule. Units fetched ahead stay where they may still be used, and the
// rest of the step is planned anew around them. All ranks leave it in the same place, so that all
// plan the same.
void StepLoop::change_schedule(UnitId unit, Pass pass) {
  require_fixed_schedule();
  const bool is_closed =
      std::any_of(uses_.begin(), uses_.begin() + acquired_, [&](const UseState& use) {
        return use.scheduled.unit == unit && use.scheduled.final_gradient;
      });
  if (policy_ == OverlapPolicy::kEager && is_closed && !cursor_.is_inference())
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("acquire: unit \"{}\" ({}) is used after what the schedule calls its last "
                    "backward use of the step, and optimizer.overlap \"eager\" may have updated it "
                    "by then; declare the use in ModelSpec::backward_order, or set "
                    "optimizer.overlap to \"deferred\"",
                    layout_.unit(unit).name, name_of(pass)));
  WindowProgress progress = halt_fetches(prefetcher_, unit, pass);
  const auto is_open = [this](UnitId of) {
    return std::ranges::any_of(open_uses_,
                               [&](std::uint32_t use) { return uses_[use].scheduled.unit == of; });
  };
  // The next use would find leases on these units, if they lasted as long as they may.
  for (std::uint32_t use =
           progress.acquired - std::min(progress.acquired, model_.concurrent_leases - 1);
       use < progress.acquired; ++use)
    if (const UnitId recent = cursor_.schedule()[use].unit; !is_open(recent))
      progress.unleased.push_back(index_of(recent));
  try {
    follow(cursor_.changed(progress, unit, pass));
  } catch (const Error&) {
    scheduler_.run([this] { prefetcher_.go_on(); });
    throw;
  }
}

// The uses that the schedule still expects will not come.
void StepLoop::end_schedule() {
  require_fixed_schedule();
  (void)halt_fetches(prefetcher_, {}, Pass::kBackward);
  follow(cursor_.ended());
}

void StepLoop::follow(StepPlan plan) {
  if (!cursor_.is_inference()) update_policy_.note_schedule_change();
  scheduler_.run([&] {
    cursor_.follow(std::move(plan));
    uses_.resize(cursor_.schedule().size() + (announced_ ? announced_->count() : 0));
    prefetcher_.resume(cursor_.schedule(), cursor_.window(), cursor_.next());
    if (commits_ && !cursor_.is_inference())
      commits_->hold(step_, uses_before_commit(cursor_.schedule(), policy_));
  });
  timeline_.change();
}

}  // namespace sluice
