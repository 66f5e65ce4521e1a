#include "engine/step/schedule_cursor.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
namespace sluice {
namespace {

// The uses of one batch: the shortest part that the schedule consists of repetitions of.
std::size_t uses_of_a_batch(const Schedule& schedule) {
  const auto is_same = [](const ScheduledUse& one, const ScheduledUse& other) {
    return one.unit == other.unit && one.pass == other.pass;
  };
  std::size_t uses = 1;
  while (uses < schedule.size() &&
         (schedule.size() % uses != 0 ||
          !std::equal(schedule.begin() + static_cast<std::ptrdiff_t>(uses), schedule.end(),
                      schedule.begin(), is_same)))
    ++uses;
  return uses;
}

// The uses to expect behind an inference of `used` uses that was longer than expected. A part of
// the second batch may be no batch that has stopped halfway, but units that each forward uses again
// at its end. Behind several batches, a part of one says nothing.
std::size_t uses_to_expect(const Schedule& schedule, std::size_t used) {
  const std::size_t batch = uses_of_a_batch(schedule);
  return used < 2 * batch ? used : used - used % batch;
}

}  // namespace

void ScheduleCursor::begin_training(std::uint32_t micro_batches, MicroBatchOrder order) {
  plan_ = &plans_.training(micro_batches, order);
  next_use_ = changes_ = 0;
  is_inference_ = takes_no_more_ = false;
  micro_batches_ = micro_batches;
  order_ = order;
}

void ScheduleCursor::begin_inference() {
  if (const std::uint32_t uses = std::exchange(fewer_uses_, 0); uses != 0) {
    Schedule schedule = plans_.inference().schedule;
    schedule.resize(uses);
    plans_.expect_inference(std::move(schedule));
  }
  plan_ = &plans_.inference();
  next_use_ = changes_ = 0;
  is_inference_ = true;
  takes_no_more_ = false;
}

void ScheduleCursor::end(bool is_example) {
  const bool is_shorter = is_inference_ && ends_with_a_batch();
  const bool is_longer =
      is_inference_ && changes_ != 0 && next_use_ > plans_.inference().schedule.size();
  plan_ = nullptr;
  if (is_shorter && changes_ == 0) fewer_uses_ = next_use_;
  if (changes_ == 0 || !is_example) return;
  // A copy, because the prefetcher uses the plan until the next step begins.
  if (is_inference_) {
    Schedule schedule = changed_plan_.schedule;
    if (is_shorter || is_longer) schedule.resize(uses_to_expect(schedule, next_use_));
    plans_.expect_inference(std::move(schedule));
  } else {
    plans_.expect_training(micro_batches_, order_, changed_plan_.schedule);
  }
}

bool ScheduleCursor::expects(UnitId unit, Pass pass) const {
  return !is_over() && schedule()[next_use_].unit == unit && schedule()[next_use_].pass == pass;
}

// Otherwise it has stopped halfway, which says nothing about the next one.
bool ScheduleCursor::ends_with_a_batch() const {
  return !is_over() && next_use_ != 0 && next_use_ % uses_of_a_batch(schedule()) == 0;
}

void ScheduleCursor::require_gradients(const char* call, std::uint32_t leases_held) const {
  const auto refuse = [call](const std::string& message) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: {}", call, message));
  };
  if (!is_active()) refuse("no step is active");
  if (leases_held != 0)
    refuse(
        fmt::format("the step is not over: {} leases are held; release them first", leases_held));
  if (std::none_of(schedule().begin(), schedule().begin() + next_use_,
                   [](const ScheduledUse& use) { return use.pass == Pass::kBackward; }))
    refuse(
        fmt::format("no unit has been through backward in this step; the schedule expects {} "
                    "next",
                    describe(next_use_)));
}

void ScheduleCursor::check_use(const char* call, Pass pass) const {
  const auto refuse = [call](const std::string& message) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: {}", call, message));
  };
  if (!is_active()) refuse("no step is active");
  if (pass != Pass::kForward && pass != Pass::kBackward && pass != Pass::kInference)
    refuse(fmt::format("there is no pass {}", static_cast<int>(pass)));
  if (takes_no_more_)
    refuse(
        fmt::format("a call of finish() has ended the step behind {} scheduled uses, and has "
                    "failed; call finish() again, or destroy the step",
                    next_use_));
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
