// The ends of leases.
#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "base/trace/trace_recorder.h"
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
  if (guard_ != nullptr && !guard_->end_at_once(state.lent, released))
    scheduler_.post(
        [this, use = lease.use] { guard_->end(uses_[use].lent, uses_[use].released()); });
  end_uses();
}

// Leases may end in any order. The flows hear of gradients in the order of the uses, in which all
// ranks reduce them. A unit's place is free once all earlier leases on the unit have ended, too.
void StepLoop::end_uses() noexcept {
  const auto post = [this](auto task) {
    // Such a queue reads while a request is submitted, so this thread could not compute meanwhile.
    config_.storage.backend == IoBackend::kSync ? scheduler_.post(task)
                                                : scheduler_.post_here(task);
  };
  std::vector<UnitId> held;              // units with an earlier lease that is not over
  std::array<bool, 2> holds_gradient{};  // the same, of gradients of shared units and of local ones
  std::vector<std::uint32_t> left;
  for (const std::uint32_t use : open_uses_) {
    UseState& of = uses_[use];
    const UnitId unit = of.scheduled.unit;
    bool& holds = holds_gradient[layout_.unit(unit).is_local ? 1 : 0];
    if (of.is_released && !of.is_over && !(of.has_gradient() && holds)) {
      of.is_over = true;
      post([this, use] { computed(use); });
    }
    if (of.is_over && std::ranges::count(held, unit) == 0) {
      post([this, use] { uses_[use].fetches->release(uses_[use].place); });
      continue;
    }
    left.push_back(use);
    if (!of.may_stay) held.push_back(unit);
    holds = holds || (of.has_gradient() && !of.is_over);
  }
  open_uses_ = std::move(left);
}

// On the scheduler's thread: the lease on the use has ended.
void StepLoop::computed(std::uint32_t use) {
  const UseState& of = uses_[use];
  home_leases_.released(of.scheduled.unit, of.released(),
                        drain_.is_closed(of.scheduled.unit) ? LeaseGradient::kNone
                        : of.has_gradient()                 ? LeaseGradient::kOwn
                                                            : LeaseGradient::kLater);
  if (!of.has_gradient()) return;
  pass_.touched(of.scheduled.unit);
  drain_.release(of.scheduled, of.gradient_slot, of.released());
}

}  // namespace sluice
