#include "engine/flow/activation_flow.h"

#include <fmt/format.h>

#include <sluice/error.h>
#include "engine/flow/lease_end.h"

namespace sluice {
namespace {

const char* name_of(ActivationAction action) {
  return action == ActivationAction::kSave ? "save" : "load";
}

}  // namespace

ActivationFlow::ActivationFlow(const FlowParts& parts, StepTimeline& timeline)
    : device_(parts.device),
      scheduler_(parts.scheduler),
      timeline_(timeline),
      held_max_(activations_held_max(parts.model)),
      guard_(parts.guard),
      place_bytes_(parts.placement.activation_window.slot_bytes),
      transfers_(parts) {}

void ActivationFlow::begin(const ActivationPlan& plan, std::uint64_t step) {
  plan_ = &plan;
  step_ = step;
  next_access_ = 0;
  next_end_ = 0;
  is_released_.assign(plan.accesses.size(), false);
  streams_.assign(plan.accesses.size(), {});
  while (asked_events_.size() < plan.accesses.size()) {
    asked_events_.emplace_back(device_);
    granted_events_.emplace_back(device_);
  }
  scheduler_.run([&] { transfers_.begin(plan, step); });
}

void ActivationFlow::begin_again() {
  if (plan_->accesses.empty() || next_access_ != plan_->accesses.size()) return;
  if (held_ != 0)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("save: {} activations of the batch before are held; release them "
                            "before the next batch",
                            held_));
  await_computation();
  begin(*plan_, step_);
}

void ActivationFlow::check_next(const ActivationRef& ref, ActivationAction action) const {
  const auto fail = [&](const std::string& why) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} {}: {}", name_of(action), describe(ref), why));
  };
  if (plan_->accesses.empty())
    fail("the engine keeps no activations; Config::activations says who keeps them");
  if (next_access_ == plan_->accesses.size()) fail("the step has no more activations");
  const ActivationAccess& next = access_at(next_access_);
  if (next.ref != ref || next.action != action)
    fail(fmt::format("{} {} is next (sluice/step.h has the sequence)", name_of(next.action),
                     describe(next.ref)));
  if (next_access_ >= held_max_ && !is_released_[next_access_ - held_max_])
    fail(
        fmt::format("{} {} is still held, and {} accesses have come since; those of an earlier use "
                    "have to be released",
                    name_of(access_at(next_access_ - held_max_).action),
                    describe(access_at(next_access_ - held_max_).ref), held_max_ - 1));
  if (action == ActivationAction::kLoad && !is_released_[next.source])
    fail("the lease that saves it is still held");
}

LeasedActivation ActivationFlow::acquire(const ActivationRef& ref, ActivationAction action,
                                         StreamId stream) {
  check_next(ref, action);
  const std::uint32_t access = next_access_;
  if (may_wait(access)) device_.record(asked_events_[access].id(), stream);
  scheduler_.await([this, access] { return transfers_.is_ready(access); });
  transfers_.wait_until_usable(stream, access);
  if (may_wait(access)) {
    device_.record(granted_events_[access].id(), stream);
    timeline_.pause(asked_events_[access].id(), granted_events_[access].id(),
                    {.reason = TraceReason::kActivation, .unit = transfers_.unit_of(access)});
  }
  streams_[access] = stream;
  ++next_access_;
  ++held_;
  return {.access = access,
          .stream = stream,
          .data = guard_ == nullptr ? transfers_.place_of(access) : guard_->lend(place_of(access))};
}

void ActivationFlow::release(const LeasedActivation& lease) noexcept {
  record_lease_end(device_, transfers_.used_event(lease.access), lease.stream);
  is_released_[lease.access] = true;
  --held_;
  if (guard_ != nullptr &&
      !guard_->end_at_once(place_of(lease.access), transfers_.used_event(lease.access)))
    scheduler_.post([this, access = lease.access] {
      guard_->end(place_of(access), transfers_.used_event(access));
    });
  // Accesses may end in any order. A place is free once all accesses to it have ended.
  for (; next_end_ < next_access_ && is_released_[next_end_]; ++next_end_)
    scheduler_.post([this, access = next_end_] { transfers_.release(access); });
}

LentMemory ActivationFlow::place_of(std::uint32_t access) const {
  return {.data = transfers_.place_of(access),
          .size_bytes = place_bytes_,
          .access = GuardedView::Access::kWrite};
}

void ActivationFlow::require_complete() const {
  if (next_access_ == plan_->accesses.size() && held_ == 0) return;
  throw Error(ErrorCode::kInvalidArgument,
              next_access_ == plan_->accesses.size()
                  ? fmt::format("finish: {} activations are held", held_)
                  : fmt::format("finish: the step is not over: {} {} is next",
                                name_of(access_at(next_access_).action),
                                describe(access_at(next_access_).ref)));
}

// Only reports of arrival are still pending.
void ActivationFlow::await_computation() {
  scheduler_.await([this] { return transfers_.idle(); });
  for (const Event& used : transfers_.used_events()) device_.synchronize(used.id());
}

ActivationReport ActivationFlow::finish() {
  await_computation();
  return transfers_.take_moved();
}

void ActivationFlow::abandon() noexcept {
  for (std::uint32_t access = 0; access < next_access_; ++access)
    if (!is_released_[access]) release({.access = access, .stream = streams_[access], .data = {}});
  SLUICE_CHECK(held_ == 0, "every lease is of an access");
  scheduler_.run([this] { transfers_.stop(); });
  scheduler_.await_settled([this] { return transfers_.is_stuck() || transfers_.idle(); });
  scheduler_.run([this] { transfers_.drop_stored(); });
  for (const Event& used : transfers_.used_events()) {
    try {
      device_.synchronize(used.id());
    } catch (...) {
      // The device keeps its failure and reports it at the application's own synchronize().
    }
  }
}

void ActivationFlow::settle() noexcept {
  scheduler_.await_settled([this] { return transfers_.idle(); });
}

}  // namespace sluice
