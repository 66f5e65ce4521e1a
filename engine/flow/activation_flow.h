// This class gives the application access to the boundary activations of a step. The application
// saves and loads the activations in the order of an ActivationPlan. This class moves the
// activations between the device's window and their homes in host memory or on storage
// (engine/flow/activation_transfers.h).
//
// Thread rule: the application's thread.
#pragma once

#include <cstdint>
#include <vector>

#include <sluice/device.h>
#include <sluice/use.h>
#include "engine/flow/activation_transfers.h"
#include "engine/flow/flow_parts.h"
#include "engine/flow/lease_guard.h"
#include "engine/plan/placement.h"
#include "engine/run/scheduler.h"
#include "engine/run/step_timeline.h"

namespace sluice {

class ActivationFlow {
 public:
  // All arguments must outlive the flow. If computation waits, the flow reports the wait to
  // `timeline`.
  ActivationFlow(const FlowParts& parts, StepTimeline& timeline);

  // Makes the flow follow `plan` for `step`. The plan must outlive the flow. Requires: finish() or
  // abandon() has ended the previous plan.
  void begin(const ActivationPlan& plan, std::uint64_t step);
  // If all accesses of the plan have been made, the call starts the same plan again. Otherwise, the
  // call does nothing. Before the plan starts again, the call waits until no computation uses the
  // window any more.
  // Fails with kInvalidArgument if an access is still held. If the engine or the device has failed
  // before, the call throws the first failure.
  void begin_again();
  // Begins the next access of the plan. Work that is enqueued on `stream` after this call may read
  // or write the activation. The call blocks until the access's transfers are on their way to the
  // device.
  // Fails with kInvalidArgument if another access is next in the plan, or if too many accesses are
  // held. If the engine has failed before, the call throws the engine's first failure.
  LeasedActivation acquire(const ActivationRef& ref, ActivationAction action, StreamId stream);
  // Ends an access. Work that is enqueued on the access's stream after this call must not use the
  // activation.
  void release(const LeasedActivation& lease) noexcept;
  // Fails with kInvalidArgument if an access of the plan is missing or is still held.
  void require_complete() const;
  // Waits until no computation uses the window any more. Returns the numbers of bytes that have
  // been moved since the last call. Requires: the plan is complete.
  // If the engine or the device has failed, the call throws the first failure.
  ActivationReport finish();
  // Ends the plan before all of its accesses have been made. The call also ends the accesses that
  // are still held. The call returns when no computation uses the window any more, and no transfer
  // is in flight. If the store is stuck, the call does not wait for the transfers.
  void abandon() noexcept;
  // Waits until no transfer is in flight, even if the store is stuck. The caller may then free the
  // memory that transfers use.
  void settle() noexcept;

 private:
  void check_next(const ActivationRef& ref, ActivationAction action) const;
  void await_computation();
  LentMemory place_of(std::uint32_t access) const;
  bool may_wait(std::uint32_t access) const {
    return access_at(access).moves || access_at(access).evicted.has_value();
  }
  const ActivationAccess& access_at(std::uint32_t access) const { return plan_->accesses[access]; }

  Device& device_;
  Scheduler& scheduler_;
  StepTimeline& timeline_;
  const std::uint32_t held_max_;  // limit for accesses held at once; the plans assume this limit
  LeaseGuard* const guard_;       // null without memory.guard
  const std::uint64_t place_bytes_;
  ActivationTransfers transfers_;

  const ActivationPlan* plan_ = nullptr;
  std::uint64_t step_ = 0;
  std::uint32_t next_access_ = 0;
  std::uint32_t held_ = 0;
  std::uint32_t next_end_ = 0;     // the transfers hear of the ends of accesses in order
  std::vector<bool> is_released_;  // by access: whether the application has released the access
  std::vector<StreamId> streams_;  // by access
  // There are two events for each access that may need a transfer. The first event is recorded
  // before the wait for this access. The second event is recorded after the wait.
  std::vector<Event> asked_events_;
  std::vector<Event> granted_events_;
};

}  // namespace sluice
