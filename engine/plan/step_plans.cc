#include "engine/plan/step_plans.h"

#include <algorithm>

#include <fmt/format.h>

#include <sluice/error.h>

namespace sluice {
namespace {

constexpr std::size_t kKeptMax = 8;

}  // namespace

StepPlans::StepPlans(const ModelSpec& model, const Layout& layout, const Placement& placement)
    : model_(model),
      layout_(layout),
      placement_(placement),
      window_unit_bytes_(sluice::window_unit_bytes(layout, placement)),
      inference_(plan(inference_schedule(model))),
      inference_activations_(plan_activations_of({.model = model, .has_backward = false})) {
  training(1, MicroBatchOrder::kHorizontal);
}

StepPlan StepPlans::plan(Schedule schedule) const {
  WindowPlan window =
      plan_window(schedule, window_unit_bytes_, placement_.window_bytes, model_.concurrent_leases);
  return {.schedule = std::move(schedule), .window = std::move(window)};
}

StepPlans::Key StepPlans::key(std::uint32_t micro_batches, MicroBatchOrder order) {
  // With one micro-batch they are the same.
  return {micro_batches, micro_batches == 1 ? MicroBatchOrder::kHorizontal : order};
}

const StepPlan& StepPlans::training(std::uint32_t micro_batches, MicroBatchOrder order) {
  const Key shape = key(micro_batches, order);
  const StepPlan& found = step_plan(shape);
  if (begun_.front() != shape) begun_ = {shape, begun_.front()};
  return found;
}

const StepPlan& StepPlans::step_plan(const Key& shape) {
  if (const auto known = kept_.find(shape); known != kept_.end() && known->second.step)
    return *keep(shape).step;
  StepPlan made = plan(training_schedule(model_, shape.first, shape.second));
  return keep(shape).step.emplace(std::move(made));
}

StepPlans::KeptPlans& StepPlans::keep(const Key& shape) {
  KeptPlans& kept = kept_[shape];
  kept.last_use = ++uses_;
  while (kept_.size() > kKeptMax) {
    auto oldest = kept_.end();
    for (auto it = kept_.begin(); it != kept_.end(); ++it) {
      const bool is_in_use = std::ranges::find(begun_, it->first) != begun_.end();
      if (!is_in_use && (oldest == kept_.end() || it->second.last_use < oldest->second.last_use))
        oldest = it;
    }
    kept_.erase(oldest);
  }
  return kept;
}

const ActivationPlan& StepPlans::activations(std::uint32_t micro_batches, MicroBatchOrder order) {
  const Key shape = key(micro_batches, order);
  if (const auto known = kept_.find(shape); known != kept_.end() && known->second.activations)
    return *keep(shape).activations;
  ActivationPlan made =
      plan_activations_of({.model = model_, .micro_batches = micro_batches, .order = order});
  return keep(shape).activations.emplace(std::move(made));
}

ActivationPlan StepPlans::plan_activations_of(const ActivationShape& shape) const {
  if (placement_.activation_window.count == 0) return {};
  const std::uint32_t places = placement_.activation_window.count;
  const bool has_homes =
      placement_.host_activation_bytes != 0 || placement_.nvme_activation_bytes != 0;
  const auto refuse = [&] {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a {} step of {} micro-batches has more activations than the pools "
                            "hold; Config::activations has to name the largest step",
                            name_of(shape.order), shape.micro_batches));
  };
  // First: such a step may be far larger than the declared one, and so may its plan.
  if (has_homes && !placement_.activation_homes.hold(shape.micro_batches, shape.order)) refuse();
  // A plan needs a place for each held access. A window without homes may have fewer places, if the
  // declared step needs no more; then, only plans that use no more are possible.
  ActivationPlan plan = plan_activations(shape, std::max(places, activations_held_max(model_)));
  if (plan.places > places || (!has_homes && plan.stored_bytes != 0)) refuse();
  return plan;
}

StepPlan StepPlans::changed(const StepPlan& plan, const WindowProgress& progress, UnitId unit,
                            Pass pass) const {
  return changed_plan(plan, progress, unit, pass,
                      {.unit_bytes = window_unit_bytes_,
                       .window_bytes = placement_.window_bytes,
                       .leases = model_.concurrent_leases});
}

StepPlan changed_plan(const StepPlan& plan, const WindowProgress& progress, UnitId unit, Pass pass,
                      const WindowShape& window) {
  WindowProgress leased = progress;
  leased.unleased.clear();
  const auto follow = [&](Schedule schedule, const WindowProgress& from) {
    StepPlan changed{.schedule = std::move(schedule), .window = {}};
    changed.window = replan_window(plan.schedule, plan.window, from, changed.schedule,
                                   window.unit_bytes, window.window_bytes, window.leases);
    return changed;
  };
  const bool is_another_batch = pass == Pass::kInference && progress.acquired != 0 &&
                                progress.acquired == plan.schedule.size() &&
                                unit == plan.schedule.front().unit;
  if (is_another_batch) {
    Schedule schedule = plan.schedule;
    schedule.insert(schedule.end(), plan.schedule.begin(), plan.schedule.end());
    try {
      return follow(std::move(schedule), leased);
    } catch (const Error&) {
      // With several leases, this use alone may have a place although not every later one has.
    }
  }
  const Schedule whole =
      changed_schedule(plan.schedule, progress.acquired, unit, pass, window.leases);
  try {
    return follow(whole, leased);
  } catch (const Error&) {
    if (window.leases == 1) throw;
  }
  // Only now are ended leases looked at: with several ranks, those of another one may end later.
  for (const std::size_t uses : {whole.size(), std::size_t{window.leases}}) {
    const auto end = std::min<std::size_t>(whole.size(), progress.acquired + uses);
    try {
      return follow({whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(end)}, progress);
    } catch (const Error&) {
      // Fewer uses may have places.
    }
  }
  return follow({whole.begin(), whole.begin() + progress.acquired + 1}, progress);
}

void StepPlans::expect_inference(Schedule schedule) {
  try {
    inference_ = plan(std::move(schedule));
  } catch (const Error&) {
    // The step went well with places found on the way; a plan from the start finds none.
  }
}

void StepPlans::expect_training(std::uint32_t micro_batches, MicroBatchOrder order,
                                Schedule schedule) {
  mark_gradients(model_, schedule);
  try {
    kept_.at(key(micro_batches, order)).step = plan(std::move(schedule));
  } catch (const Error&) {
    // As above.
  }
}

Traffic StepPlans::predict_traffic(std::uint32_t micro_batches, MicroBatchOrder order) const {
  // Keeps and drops nothing: a program may ask on one rank alone, and the ranks' plans stay equal.
  const auto known = kept_.find(key(micro_batches, order));
  const KeptPlans* const kept = known == kept_.end() ? nullptr : &known->second;
  std::optional<StepPlan> step;
  if (kept == nullptr || !kept->step)
    step = plan(training_schedule(model_, micro_batches, key(micro_batches, order).second));
  std::optional<ActivationPlan> activations;
  if (kept == nullptr || !kept->activations)
    activations =
        plan_activations_of({.model = model_, .micro_batches = micro_batches, .order = order});
  const StepPlan& used = step ? *step : *kept->step;
  return predict_step_traffic(layout_, placement_, used.schedule, used.window,
                              activations ? *activations : *kept->activations);
}

}  // namespace sluice
