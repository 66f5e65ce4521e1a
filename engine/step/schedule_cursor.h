// The position of the current step in the step's schedule. The cursor says which use comes next,
// and how the schedule changes when computation leaves the schedule. After such a change, the rest
// of the step is planned again. The next step of the same shape is expected to follow the changed
// schedule.
//
// Thread rule: the application's thread. The scheduler's thread also reads the schedule, so
// follow() runs on that thread.
// Invariant: the uses with a number below next() have been acquired, and all other uses are still
// expected.
#pragma once

#include <string>

#include "engine/plan/step_plans.h"

namespace sluice {

class ScheduleCursor {
 public:
  // All arguments must outlive the object. `model` is validated().
  // Fails with kOutOfMemory if the window cannot hold the leases.
  ScheduleCursor(const ModelSpec& model, const Layout& layout, const Placement& placement)
      : layout_(layout), plans_(model, layout, placement) {}

  void begin_training(std::uint32_t micro_batches, MicroBatchOrder order);
  void begin_inference();
  // If `is_example` is true, the next step of the same shape is expected to repeat this step's
  // order of units.
  void end(bool is_example);

  bool is_active() const { return plan_ != nullptr; }
  bool is_inference() const { return is_inference_; }
  const Schedule& schedule() const { return plan_->schedule; }
  const WindowPlan& window() const { return plan_->window; }

  std::uint32_t next() const { return next_use_; }
  void advance() { ++next_use_; }
  bool is_over() const { return next_use_ == plan_->schedule.size(); }
  bool expects(UnitId unit, Pass pass) const;
  // `call` is the name of the application's call. This call needs the gradients of a step.
  // Fails with kInvalidArgument if no step is active, if leases are held, or if no unit has been
  // used in the backward pass.
  void require_gradients(const char* call, std::uint32_t leases_held) const;
  // Makes check_use() refuse all further uses of the step. finish() calls this function before the
  // gradients are final, because a gradient that comes later would never be.
  void take_no_more() { takes_no_more_ = true; }
  // `call` is the name of the application's call. This call brings a use in `pass`.
  // Fails with kInvalidArgument if no step is active, if there is no such pass, or behind
  // take_no_more().
  void check_use(const char* call, Pass pass) const;
  // Describes a use in words, for messages. If `use` equals the number of uses, the text describes
  // the end of the step.
  std::string describe(std::size_t use) const;

  // Returns the plan in which `unit` comes next, instead of the expected unit.
  // Fails with kOutOfMemory if the window cannot hold `unit` together with the leased units.
  StepPlan changed(const WindowProgress& progress, UnitId unit, Pass pass) const {
    return plans_.changed(*plan_, progress, unit, pass);
  }
  // Returns the plan without the uses that are still expected.
  StepPlan ended() const;
  // Makes the step follow the schedule of `plan` from now on.
  void follow(StepPlan plan);
  // Returns how often the schedule was changed.
  std::uint32_t changes() const { return changes_; }

  StepPlans& plans() { return plans_; }
  const StepPlans& plans() const { return plans_; }

 private:
  // Returns whether an inference has stopped at a point where another batch was expected to begin.
  bool ends_with_a_batch() const;

  const Layout& layout_;
  StepPlans plans_;

  const StepPlan* plan_ = nullptr;  // null between steps
  StepPlan changed_plan_;           // plan_ points here after computation has left the schedule
  std::uint32_t next_use_ = 0;
  std::uint32_t changes_ = 0;
  // If the last inference had fewer uses than expected, this member is the number of its uses. The
  // plan for inferences changes only when the next inference begins, because the prefetcher uses
  // the old plan until then.
  std::uint32_t fewer_uses_ = 0;
  bool is_inference_ = false;
  bool takes_no_more_ = false;
  std::uint32_t micro_batches_ = 1;
  MicroBatchOrder order_ = MicroBatchOrder::kHorizontal;
};

}  // namespace sluice
