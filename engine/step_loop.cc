#include "engine/step_loop.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "base/trace.h"
#include "base/units.h"

namespace sluice {

StepLoop::StepLoop(const Config& config, const ModelSpec& model, const Layout& layout,
                   const Placement& placement, const Tiers& tiers, BlockStore& store,
                   IoQueue& queue, Device& device, Scheduler& scheduler, Worker& worker)
    : config_(config),
      model_(model),
      layout_(layout),
      placement_(placement),
      tiers_(tiers),
      store_(store),
      queue_(queue),
      device_(device),
      scheduler_(scheduler),
      window_unit_bytes_(window_unit_bytes(layout, placement)),
      prefetcher_(layout, placement, tiers, store, device, scheduler),
      drain_(layout, placement, tiers, device, scheduler, worker),
      pass_(layout, placement, tiers, store, device, scheduler, worker) {
  // Planned now, so that a window that cannot hold the leases is an error before the first step.
  plan_for(0);
  plan_for(1);
}

const StepLoop::Plan& StepLoop::plan_for(std::uint32_t micro_batches) {
  const auto known = plans_.find(micro_batches);
  if (known != plans_.end()) return known->second;
  Plan plan;
  plan.schedule =
      micro_batches == 0 ? inference_schedule(model_) : training_schedule(model_, micro_batches);
  plan.window = plan_window(plan.schedule, window_unit_bytes_, placement_.window_bytes,
                            model_.concurrent_leases);
  return plans_.emplace(micro_batches, std::move(plan)).first->second;
}

Traffic StepLoop::predict_traffic(std::uint32_t micro_batches) {
  const Plan& plan = plan_for(micro_batches);
  return predict_step_traffic(layout_, placement_, plan.schedule, plan.window);
}

void StepLoop::throw_if_unusable() const {
  if (poison_) throw *poison_;
  scheduler_.throw_if_failed();
}

void StepLoop::begin_step(const StepOptions& options) {
  if (!(options.learning_rate >= 0) || !std::isfinite(options.learning_rate))
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("begin_step: learning_rate is {}; it must be finite and not negative",
                            options.learning_rate));
  if (options.micro_batches == 0)
    throw Error(ErrorCode::kInvalidArgument,
                "begin_step: micro_batches is 0; a step has at least one");
  options_ = options;
  begin(plan_for(options.micro_batches));
}

void StepLoop::begin_inference() {
  begin(plan_for(0));
}

void StepLoop::begin(const Plan& plan) {
  throw_if_unusable();
  if (is_active())
    throw Error(ErrorCode::kInvalidArgument,
                "a step or an inference is still active; finish or destroy it first");
  next_use_ = 0;
  leases_held_ = 0;
  uses_.assign(plan.schedule.size(), {});
  while (arrived_events_.size() < plan.schedule.size()) {
    arrived_events_.emplace_back(device_);
    resumed_events_.emplace_back(device_);
  }
  counters_at_begin_ = queue_.counters();
  scheduler_.run([&] {
    drain_.begin(applied_step_ + 1);
    prefetcher_.begin(plan.schedule, plan.window, applied_step_);
  });
  plan_ = &plan;
}

std::string StepLoop::describe_use(std::size_t use) const {
  if (use == plan_->schedule.size()) return "the end of the step";
  const ScheduledUse& scheduled = plan_->schedule[use];
  return fmt::format("unit \"{}\" ({})", layout_.unit(scheduled.unit).name,
                     name_of(scheduled.pass));
}

void StepLoop::check_acquire(UnitId unit, Pass pass) const {
  const auto fail = [](const std::string& message) {
    throw Error(ErrorCode::kInvalidArgument, "acquire: " + message);
  };
  if (!is_active()) fail("no step is active");
  if (index_of(unit) >= layout_.units().size())
    fail(fmt::format("unit {} does not exist; the model has {}", index_of(unit),
                     layout_.units().size()));
  if (next_use_ == plan_->schedule.size() || plan_->schedule[next_use_].unit != unit ||
      plan_->schedule[next_use_].pass != pass) {
    fail(
        fmt::format("unit \"{}\" ({}) is not next; the schedule expects {} "
                    "(ModelSpec::forward_order and backward_order "
                    "declare it)",
                    layout_.unit(unit).name, name_of(pass), describe_use(next_use_)));
  }
  if (next_use_ >= model_.concurrent_leases &&
      !uses_[next_use_ - model_.concurrent_leases].is_released)
    fail(fmt::format("the lease on {} is still held; ModelSpec::concurrent_leases is {}",
                     describe_use(next_use_ - model_.concurrent_leases), model_.concurrent_leases));
}

LeasedUse StepLoop::acquire(UnitId unit, Pass pass, StreamId stream) {
  throw_if_unusable();
  check_acquire(unit, pass);
  const std::uint64_t begin_ns = steady_now_ns();
  const std::uint32_t use = next_use_;
  UseState& state = uses_[use];
  device_.record(arrived_events_[use].id(), stream);
  scheduler_.await([&] {
    if (!prefetcher_.is_ready(use)) return false;
    if (pass == Pass::kBackward) state.gradient_slot = drain_.try_take_slot();
    return pass != Pass::kBackward || state.gradient_slot.has_value();
  });
  device_.wait(stream, prefetcher_.ready_event(unit));
  device_.record(resumed_events_[use].id(), stream);
  LeasedUse lease{.use = use, .unit = unit};
  lease.parameters = window_unit_bytes_[index_of(unit)] == 0
                         ? tiers_.resident_parameters(unit)
                         : tiers_.window() + plan_->window.uses[use].offset_bytes;
  if (state.gradient_slot) {
    lease.gradients = tiers_.gradient_slot(*state.gradient_slot);
    device_.fill_zero(lease.gradients, layout_.unit_gradient_bytes(unit), stream);
  }
  state.stream = stream;
  ++next_use_;
  ++leases_held_;
  if (trace_enabled()) {
    trace_record({.begin_ns = begin_ns,
                  .end_ns = steady_now_ns(),
                  .step = applied_step_ + 1,
                  .unit = index_of(unit),
                  .kind = TraceKind::kAcquire});
  }
  return lease;
}

void StepLoop::release(const LeasedUse& lease) noexcept {
  UseState& state = uses_[lease.use];
  device_.record(prefetcher_.release_event(lease.unit), state.stream);
  state.is_released = true;
  --leases_held_;
  scheduler_.post([this, use = lease.use] {
    const ScheduledUse& scheduled = plan_->schedule[use];
    if (uses_[use].gradient_slot)
      drain_.release(scheduled, *uses_[use].gradient_slot,
                     prefetcher_.release_event(scheduled.unit));
    prefetcher_.release(use);
  });
}

StepReport StepLoop::finish_step() {
  throw_if_unusable();
  if (!is_active()) throw Error(ErrorCode::kInvalidArgument, "finish: no step is active");
  if (next_use_ != plan_->schedule.size() || leases_held_ != 0)
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "finish: the step is not over: {} leases are held, and the schedule expects {} next",
            leases_held_, describe_use(next_use_)));
  const std::uint64_t begin_ns = steady_now_ns();
  scheduler_.await([this] { return drain_.is_complete() && drain_.idle() && prefetcher_.idle(); });
  throw_if_device_failed();
  StepReport report;
  report.step = applied_step_;
  const std::uint64_t pass_begin_ns = steady_now_ns();
  if (drain_.norm().finite()) {
    report.gradient_norm = mean_gradient_norm();
    const double clip = config_.optimizer.clip_norm;
    if (clip > 0 && report.gradient_norm > clip) report.clip_factor = clip / report.gradient_norm;
    run_pass(report.clip_factor);
    report.step = applied_step_;
  } else if (config_.optimizer.non_finite == NonFinitePolicy::kSkip) {
    report.gradient_norm = std::numeric_limits<double>::quiet_NaN();
    report.skipped = true;
  } else {
    fail_non_finite();
  }
  const std::uint64_t end_ns = steady_now_ns();
  const IoCounters counters = queue_.counters();
  report.stall_ns = stall_ns();
  report.optimizer_ns = static_cast<std::int64_t>(end_ns - pass_begin_ns);
  report.nvme_read_bytes = counters.read_bytes - counters_at_begin_.read_bytes;
  report.nvme_write_bytes = counters.write_bytes - counters_at_begin_.write_bytes;
  report.notes = store_.take_notes();
  plan_ = nullptr;
  if (trace_enabled())
    trace_record(
        {.begin_ns = begin_ns, .end_ns = end_ns, .step = report.step, .kind = TraceKind::kFinish});
  return report;
}

// Everything enqueued has completed by now; what failed on the way must not be taken for a result.
void StepLoop::throw_if_device_failed() const {
  device_.synchronize(arrived_events_.front().id());
}

// sqrt(sum of squares) / micro-batches: the set holds the sum over the micro-batches.
double StepLoop::mean_gradient_norm() const {
  return std::sqrt(drain_.norm().sum_of_squares()) / options_.micro_batches;
}

void StepLoop::run_pass(double clip_factor) {
  const OptimizerOptions decayed = config_.optimizer.options();
  OptimizerOptions plain = decayed;
  plain.adam.weight_decay = 0;
  const auto scale = static_cast<float>(clip_factor / options_.micro_batches);
  const std::uint64_t step = applied_step_ + 1;
  const StepCoefficients coefficients{
      .decayed = coefficients_of(decayed, options_.learning_rate, step, scale),
      .plain = coefficients_of(plain, options_.learning_rate, step, scale)};
  try {
    scheduler_.run([&] { pass_.begin(coefficients, applied_step_); });
    scheduler_.await([this] { return pass_.is_complete() && pass_.idle(); });
    throw_if_device_failed();
  } catch (const std::exception& error) {
    poison_ =
        Error(ErrorCode::kPoisoned, fmt::format("the update of step {} failed midway, so the state "
                                                "is neither that of step {} nor of step {}; start "
                                                "again from the last saved model: {}",
                                                step, applied_step_, step, error.what()));
    throw;
  }
  applied_step_ = step;
}

void StepLoop::fail_non_finite() const {
  for (const TensorPlace& tensor : layout_.tensors()) {
    const std::byte* gradient = tiers_.gradient_set(tensor.unit) +
                                tensor.offset_elements * layout_.format().gradient_bytes();
    const auto index = find_non_finite(layout_.format().gradient, gradient, tensor.element_count);
    if (index)
      throw Error(
          ErrorCode::kNonFinite,
          fmt::format("the gradient of \"{}\" (unit \"{}\") is not finite at element {} in step "
                      "{}; nothing was updated. Lower "
                      "the learning rate, or set optimizer.non_finite to \"skip\"",
                      tensor.name, layout_.unit(tensor.unit).name, *index, applied_step_ + 1));
  }
  throw Error(
      ErrorCode::kNonFinite,
      fmt::format("a gradient outside every tensor is not finite in step {}; nothing was updated",
                  applied_step_ + 1));
}

std::int64_t StepLoop::stall_ns() const {
  std::int64_t total_ns = 0;
  for (std::size_t use = 0; use < plan_->schedule.size(); ++use)
    total_ns += device_.elapsed_ns(arrived_events_[use].id(), resumed_events_[use].id());
  return total_ns;
}

bool StepLoop::is_idle() const {
  return prefetcher_.idle() && drain_.idle() && pass_.idle();
}

void StepLoop::settle() noexcept {
  queue_.wait_idle();
  scheduler_.await_settled([this] { return is_idle(); });
}

void StepLoop::abandon() noexcept {
  if (!is_active()) return;
  SLUICE_CHECK(leases_held_ == 0, "leases end before the step that gave them");
  scheduler_.run([this] { prefetcher_.stop(); });
  scheduler_.await_settled([this] { return store_.is_stuck() || is_idle(); });
  // The window's bytes may be overwritten next: nothing may compute on them any more.
  for (std::uint32_t use = 0; use < next_use_; ++use) {
    try {
      device_.synchronize(prefetcher_.release_event(plan_->schedule[use].unit));
    } catch (...) {
      // The device keeps its failure and reports it at the application's own synchronize().
    }
  }
  plan_ = nullptr;
}

}  // namespace sluice
