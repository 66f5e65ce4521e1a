#include "engine/step/schedule_cursor.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

namespace sluice {

void ScheduleCursor::begin_training(std::uint32_t micro_batches, MicroBatchOrder order) {
  plan_ = &plans_.training(micro_batches, order);
  next_use_ = changes_ = 0;
  is_inference_ = false;
  micro_batches_ = micro_batches;
  order_ = order;
}

void ScheduleCursor::begin_inference() {
  plan_ = &plans_.inference();
  next_use_ = changes_ = 0;
  is_inference_ = true;
}

void ScheduleCursor::end(bool is_example) {
  plan_ = nullptr;
  if (changes_ == 0 || !is_example) return;
  // A copy, because the prefetcher uses the plan until the next step begins.
  if (is_inference_) {
    plans_.expect_inference(changed_plan_.schedule);
  } else {
    plans_.expect_training(micro_batches_, order_, changed_plan_.schedule);
  }
}

bool ScheduleCursor::expects(UnitId unit, Pass pass) const {
  return !is_over() && schedule()[next_use_].unit == unit && schedule()[next_use_].pass == pass;
}

bool ScheduleCursor::has_been_backward() const {
  return std::any_of(schedule().begin(), schedule().begin() + next_use_,
                     [](const ScheduledUse& use) { return use.pass == Pass::kBackward; });
}

std::string ScheduleCursor::describe(std::size_t use) const {
  if (use == schedule().size()) return "the end of the step";
  return fmt::format("unit \"{}\" ({})", layout_.unit(schedule()[use].unit).name,
                     name_of(schedule()[use].pass));
}

StepPlan ScheduleCursor::ended() const {
  StepPlan plan = *plan_;
  plan.schedule.resize(next_use_);
  plan.window.uses.resize(next_use_);
  return plan;
}

void ScheduleCursor::follow(StepPlan plan) {
  ++changes_;
  changed_plan_ = std::move(plan);
  plan_ = &changed_plan_;
}

}  // namespace sluice
