// The ends of leases: of each one, and of all at the end of a step or an inference.
#include <sluice/error.h>
#include "base/trace/trace.h"
#include "engine/flow/lease_end.h"
#include "engine/step/step_loop.h"

namespace sluice {

void StepLoop::release(const LeasedUse& lease) noexcept {
  UseState& state = uses_[lease.use];
  // A unit has one event: after this use, and after those before it, on any stream.
  const EventId released = state.released();
  record_lease_end(device_, released, state.stream);
  state.is_released = true;
  lease_ends_.note(state.stream, released);
  end_trace_range(state.range);
  --leases_held_;
  if (guard_ != nullptr)
    scheduler_.post(
        [this, use = lease.use] { guard_->end(uses_[use].lent, uses_[use].released()); });
  if (state.may_stay) return end_use(lease.use);
  // Leases may end in any order. Ranks reduce gradients in the order of the uses all the same, and
  // a unit's place is free once all leases on it have ended.
  for (std::uint32_t& next = next_end_[state.is_local ? 1 : 0]; next < acquired_; ++next) {
    const UseState& of = uses_[next];
    if (of.is_local != state.is_local || of.may_stay) continue;
    if (!of.is_released) return;
    end_use(next);
  }
}

// Tells the flows that the lease on the use has ended.
void StepLoop::end_use(std::uint32_t ended) noexcept {
  auto task = [this, use = ended] {
    const UseState& of = uses_[use];
    home_leases_.released(of.scheduled.unit, of.released(),
                          drain_.is_closed(of.scheduled.unit) ? LeaseGradient::kNone
                          : of.has_gradient()                 ? LeaseGradient::kOwn
                                                              : LeaseGradient::kLater);
    if (of.has_gradient()) {
      pass_.touched(of.scheduled.unit);
      drain_.release(of.scheduled, of.gradient_slot, of.released());
    }
    of.fetches->release(of.place);
  };
  // Such a queue reads while a request is submitted, so this thread could not compute meanwhile.
  config_.storage.backend == IoBackend::kSync ? scheduler_.post(task) : scheduler_.post_here(task);
}

// The application still holds leases, which from here on refer to nothing.
void StepLoop::end_leases() noexcept {
  for (std::uint32_t use = 0; use < acquired_; ++use)
    if (!uses_[use].is_released) release({.use = use, .unit = uses_[use].scheduled.unit});
  SLUICE_CHECK(leases_held_ == 0, "every lease is of a use");
}

}  // namespace sluice
