// Boundary activations, as the application sees them. The application saves and loads these
// activations in the order of an ActivationPlan. The flow moves the activations between the
// device's window and their homes in host memory or on storage
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
#include "engine/plan/placement.h"
#include "engine/run/scheduler.h"
#include "engine/run/step_timeline.h"

namespace sluice {

class ActivationFlow {
 public:
  // All arguments must outlive the flow. The flow tells `timeline` when computation waits.
  ActivationFlow(const FlowParts& parts, StepTimeline& timeline);

  // Makes the flow follow `plan` for `step`. The plan must outlive the flow. Requires: the previous
  // plan has been finished or abandoned.
  void begin(const ActivationPlan& plan, std::uint64_t step);
  // Follows the same plan once more, if all of its accesses have been made. The call waits until no
  // computation uses the window any more.
  // Fails with kInvalidArgument if an access is still held, and with the engine's or the device's
  // first failure.
  void begin_again();
  // Makes the next access of the plan. Work enqueued on `stream` after this call may read or write
  // the activation. The call blocks until the transfers are on their way to the device.
  // Fails with kInvalidArgument if the access is not next or too many are held, and with the
  // engine's first failure.
  LeasedActivation acquire(const ActivationRef& ref, ActivationAction action, StreamId stream);
  // Ends an access. Work enqueued on the stream after this call must leave the activation alone.
  void release(const LeasedActivation& lease) noexcept;
  // Fails with kInvalidArgument if accesses of the plan are missing or still held.
  void require_complete() const;
  // The call waits until no computation uses the window any more. The call returns the totals since
  // the last call. Requires: the plan is complete.
  // Fails with the engine's or the device's first failure.
  ActivationReport finish();
  // Ends a plan early. Returns when no transfer is in flight and no computation uses the window any
  // more, unless the store is stuck. Ends the accesses that are held.
  void abandon() noexcept;
  // Returns when no transfer is in flight, even if the store is stuck, so that memory may then be
  // freed.
  void settle() noexcept;

 private:
  void check_next(const ActivationRef& ref, ActivationAction action) const;
  void await_computation();
  bool may_wait(std::uint32_t access) const {
    return access_at(access).moves || access_at(access).evicted.has_value();
  }
  const ActivationAccess& access_at(std::uint32_t access) const { return plan_->accesses[access]; }

  Device& device_;
  Scheduler& scheduler_;
  StepTimeline& timeline_;
  const std::uint32_t held_max_;  // accesses held at once, as the plans assume
  ActivationTransfers transfers_;

  const ActivationPlan* plan_ = nullptr;
  std::uint64_t step_ = 0;
  std::uint32_t next_access_ = 0;
  std::uint32_t held_ = 0;
  std::vector<bool> is_released_;  // by access, as the application sees it
  std::vector<StreamId> streams_;  // by access
  // The two events around the wait for an access, for each access that may need a transfer.
  std::vector<Event> asked_events_;
  std::vector<Event> granted_events_;
};

}  // namespace sluice
