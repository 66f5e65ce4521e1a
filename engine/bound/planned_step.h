// Describes a training step under a placement, in the form that engine/bound/bound.h takes. The
// object has the schedule, the window and the activations of the step. The object also has an
// example of the uses that the step announces. The object is constant after construction. Any
// thread may call the functions of the object.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/bound/step_cost.h"
#include "engine/plan/activation_plan.h"
#include "engine/plan/schedule.h"
#include "engine/plan/window_plan.h"

namespace sluice {

// Uses that the step announces. These uses come before use number `before_use` of the step's
// schedule. The announcement comes before use number `announced_before`, and this number is at most
// `before_use`.
struct PlannedAnnouncement {
  std::uint32_t before_use = 0;
  std::uint32_t announced_before = before_use;
  Pass pass = Pass::kForward;
  std::vector<UnitId> units;
  // The number of updates that each unit has missed when the step begins, if optimizer.untouched is
  // "lazy". Each unit makes up for these updates before the step's first use of the unit.
  std::uint32_t missed_updates = 0;
};

class PlannedStep {
 public:
  // `layout` and `placement` must outlive the object. `commit_every` is the config's
  // storage.state.commit_every. `announcements` are in order, and every step has the same
  // announcements.
  PlannedStep(const ActivationShape& step, const Layout& layout, const Placement& placement,
              std::uint32_t commit_every, std::span<const PlannedAnnouncement> announcements = {});

  // The object and `rates` must outlive the result.
  StepShape shape(const Rates& rates) const;

 private:
  void insert(const ModelSpec& model, std::span<const PlannedAnnouncement> announcements);

  const Layout& layout_;
  const Placement& placement_;
  Schedule schedule_;
  WindowPlan window_;
  std::vector<std::uint32_t> announced_after_;  // as in StepShape
  std::vector<LateUnit> late_units_;            // as in StepShape
  const ActivationPlan activations_;            // empty if the application keeps activations
  const std::uint32_t commit_every_;
};

}  // namespace sluice
