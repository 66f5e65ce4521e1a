#include "engine/step_loop.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "base/trace.h"
#include "base/units.h"

namespace sluice {

StepLoop::StepLoop(const Config& config, const ModelSpec& model, const Layout& layout,
                   const Placement& placement, const Tiers& tiers, BlockStore& store,
                   IoQueue& queue, Device& device, Scheduler& scheduler, Worker& worker)
    : config_(config),
      model_(model),
      groups_(config.optimizer, model),
      layout_(layout),
      placement_(placement),
      tiers_(tiers),
      store_(store),
      queue_(queue),
      device_(device),
      scheduler_(scheduler),
      update_policy_(config.optimizer, placement.shadow_bytes != 0),
      traffic_(queue),
      plans_(model, layout, placement),
      slots_(placement, tiers, store, layout.blocks().size(), [this] { pump(); }),
      prefetcher_(layout, placement, tiers, slots_, store, device, scheduler,
                  {.on_change = [this] { pump(); },
                   .on_final_fetch = [this](UnitId unit) { pass_.fetched(unit); }}),
      drain_(layout, placement, tiers, device, scheduler, worker,
             [this](UnitId unit) { pass_.gradient_is_final(unit); }),
      pass_(layout, placement, tiers, slots_, store, device, scheduler, worker, model.forward_order,
            [this] { pump(); }),
      activations_(placement, tiers, store, device, scheduler, activations_held_max(model)) {}

// Lets every flow move on whose turn it is. A change that they make on the way makes them look
// again.
void StepLoop::pump() {
  must_pump_again_ = true;
  if (is_pumping_) return;
  is_pumping_ = true;
  while (must_pump_again_) {
    must_pump_again_ = false;
    pass_.pump();
    prefetcher_.pump();
  }
  is_pumping_ = false;
}

void StepLoop::throw_if_unusable() {
  if (poison_) throw *poison_;
  try {
    scheduler_.throw_if_failed();
  } catch (...) {
    give_up();
    throw;
  }
}

void StepLoop::await(const std::function<bool()>& ready) {
  try {
    scheduler_.await(ready);
  } catch (...) {
    give_up();
    throw;
  }
}

// After a failure that struck in mid-update, later calls say so.
void StepLoop::give_up() {
  if (poison_) return;
  bool is_partial = false;
  std::uint64_t version = 0;
  scheduler_.run([&] {
    is_partial = pass_.is_partial();
    version = pass_.version();
  });
  if (!is_partial) return;
  try {
    scheduler_.throw_if_failed();
    device_.synchronize(arrived_events_.front().id());
  } catch (const std::exception& error) {
    poison_ =
        Error(ErrorCode::kPoisoned,
              fmt::format("the update of step {} failed midway, so the state is neither that of "
                          "step {} nor of step {}; start again from the last saved model: {}",
                          version + 1, version, version + 1, error.what()));
  }
}

void StepLoop::begin_step(const StepOptions& options) {
  if (!(options.learning_rate >= 0) || !std::isfinite(options.learning_rate))
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("begin_step: learning_rate is {}; it must be finite and not negative",
                            options.learning_rate));
  if (options.micro_batches == 0)
    throw Error(ErrorCode::kInvalidArgument,
                "begin_step: micro_batches is 0; a step has at least one");
  throw_if_unusable();
  options_ = options;
  policy_ = update_policy_.choose();
  const StepCoefficients assumed = coefficients(/*clip_factor=*/1);
  begin(plans_.training(options.micro_batches, options.order));
  scheduler_.run(
      [&] { pass_.announce({.policy = policy_, .version = step_, .coefficients = assumed}); });
}

void StepLoop::begin_inference() {
  drain();
  traffic_.pause();
  begin(plans_.inference());
}

void StepLoop::drain() {
  throw_if_unusable();
  await([this] { return pass_.is_home(); });
  if (std::exchange(has_undrained_update_, false)) throw_if_device_failed();
}

std::uint64_t StepLoop::applied_step() const {
  bool is_applied = false;
  scheduler_.run([&] { is_applied = pass_.is_applied(); });
  return is_applied ? step_ : step_ - 1;
}

void StepLoop::lend_buffers() {
  drain();
  traffic_.pause();
  scheduler_.run([this] { slots_.drop_kept(); });
}

void StepLoop::return_buffers() {
  traffic_.resume();
}

void StepLoop::begin(const StepPlan& plan) {
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
  plan_ = &plan;
  const bool keeps_for_update =
      policy_ == OverlapPolicy::kEager || policy_ == OverlapPolicy::kSpeculative;
  scheduler_.run([&] {
    drain_.begin(step_ + 1);
    prefetcher_.begin(plan.schedule, plan.window, step_, keeps_for_update);
  });
  activations_.begin(plan.activations);
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
  std::uint64_t update_awaited_ns = 0;  // last seen
  await([&] {
    if (prefetcher_.awaits_update()) update_awaited_ns = steady_now_ns();
    if (!prefetcher_.is_ready(use)) return false;
    if (pass == Pass::kBackward) state.gradient_slot = drain_.try_take_slot();
    return pass != Pass::kBackward || state.gradient_slot.has_value();
  });
  if (update_awaited_ns > begin_ns)
    state.update_wait_ns = static_cast<std::int64_t>(update_awaited_ns - begin_ns);
  device_.wait(stream, placement_.unit_is_on_device(layout_.unit(unit))
                           ? pass_.resident_event(unit)
                           : prefetcher_.ready_event(unit));
  device_.record(resumed_events_[use].id(), stream);
  LeasedUse lease{.use = use, .unit = unit};
  lease.parameters = plans_.window_unit_bytes()[index_of(unit)] == 0
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
                  .step = step_ + 1,
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
  activations_.require_complete();
  const std::uint64_t begin_ns = steady_now_ns();
  await([this] {
    return drain_.is_complete() && drain_.idle() && prefetcher_.idle() && pass_.is_begun() &&
           activations_.idle();
  });
  throw_if_device_failed();
  StepReport report;
  report.policy = policy_;
  const std::uint64_t pass_begin_ns = steady_now_ns();
  if (drain_.norm().finite()) {
    apply(report);
  } else if (config_.optimizer.non_finite == NonFinitePolicy::kSkip) {
    report.gradient_norm = std::numeric_limits<double>::quiet_NaN();
    report.skipped = true;
    scheduler_.run([this] { pass_.cancel(); });
  } else {
    fail_non_finite();
  }
  update_policy_.note(report.skipped || report.clip_factor < 1);
  report.step = step_;
  const std::uint64_t end_ns = steady_now_ns();
  report.optimizer_ns = static_cast<std::int64_t>(end_ns - pass_begin_ns);
  count_stalls(report);
  const Traffic moved = traffic_.take();
  report.nvme_read_bytes = moved.nvme_read_bytes;
  report.nvme_write_bytes = moved.nvme_write_bytes;
  scheduler_.run([&] { report.notes = store_.take_notes(); });
  const ActivationFlow::Moved activations = activations_.take_moved();
  report.activation_out_bytes = activations.out_bytes;
  report.activation_in_bytes = activations.in_bytes;
  plan_ = nullptr;
  if (trace_enabled())
    trace_record(
        {.begin_ns = begin_ns, .end_ns = end_ns, .step = report.step, .kind = TraceKind::kFinish});
  return report;
}

// Everything enqueued has completed by now; what failed on the way must not be taken for a result.
void StepLoop::throw_if_device_failed() {
  if (arrived_events_.empty()) return;  // nothing has been enqueued yet
  try {
    device_.synchronize(arrived_events_.front().id());
  } catch (...) {
    give_up();
    throw;
  }
}

// sqrt(sum of squares) / micro-batches: the set holds the sum over the micro-batches.
double StepLoop::mean_gradient_norm() const {
  return std::sqrt(drain_.norm().sum_of_squares()) / options_.micro_batches;
}

StepCoefficients StepLoop::coefficients(double clip_factor) const {
  const auto scale = static_cast<float>(clip_factor / options_.micro_batches);
  return groups_.coefficients(options_.learning_rate, step_ + 1, scale);
}

// The norm is known: lets the update run, or what is left of it.
void StepLoop::apply(StepReport& report) {
  report.gradient_norm = mean_gradient_norm();
  report.clip_factor = update_policy_.clip_factor(report.gradient_norm);
  const bool as_assumed = report.clip_factor == 1;
  report.redone = policy_ == OverlapPolicy::kSpeculative && !as_assumed;
  const StepCoefficients known = coefficients(report.clip_factor);
  has_undrained_update_ = true;
  scheduler_.run([&] { pass_.apply(known, as_assumed); });
  ++step_;
  if (policy_ == OverlapPolicy::kSerial) drain();
}

// Nothing has been updated, but under the eager policy.
void StepLoop::fail_non_finite() {
  bool is_partial = false;
  scheduler_.run([&] { is_partial = pass_.is_partial(); });
  const std::string outcome =
      is_partial ? "blocks have been updated with other gradients by then (optimizer.overlap eager)"
                 : "nothing was updated";
  throw Error(ErrorCode::kNonFinite,
              fmt::format("{} in step {}; {}. Lower the learning rate, or set optimizer.non_finite "
                          "to \"skip\"",
                          drain_.describe_non_finite(), step_ + 1, outcome));
}

void StepLoop::count_stalls(StepReport& report) const {
  report.stall_ns = activations_.stall_ns();
  for (std::size_t use = 0; use < plan_->schedule.size(); ++use) {
    const std::int64_t stall_ns =
        device_.elapsed_ns(arrived_events_[use].id(), resumed_events_[use].id());
    report.stall_ns += stall_ns;
    report.stall_for_update_ns += std::min(stall_ns, uses_[use].update_wait_ns);
  }
}

bool StepLoop::is_idle() const {
  return prefetcher_.idle() && drain_.idle() && pass_.idle() && activations_.idle();
}

void StepLoop::settle() noexcept {
  scheduler_.run([this] {
    prefetcher_.stop();
    pass_.stop();
    activations_.stop();
  });
  queue_.wait_idle();
  scheduler_.await_settled([this] { return is_idle(); });
}

void StepLoop::abandon() noexcept {
  if (!is_active()) return;
  SLUICE_CHECK(leases_held_ == 0, "leases end before the step that gave them");
  bool is_partial = false;
  scheduler_.run([&] {
    prefetcher_.stop();
    activations_.stop();
    is_partial = pass_.is_begun() && pass_.is_partial();
    pass_.cancel();
  });
  if (is_partial && !poison_) {
    poison_ = Error(ErrorCode::kPoisoned,
                    fmt::format("step {} was abandoned after blocks had been updated "
                                "(optimizer.overlap eager), so the state is neither that of step "
                                "{} nor of step {}; start again from the last saved model",
                                step_ + 1, step_, step_ + 1));
  }
  scheduler_.await_settled([this] {
    return store_.is_stuck() || (prefetcher_.idle() && drain_.idle() && activations_.idle());
  });
  // The window's bytes may be overwritten next: nothing may compute on them any more.
  activations_.close();
  for (std::uint32_t use = 0; use < next_use_; ++use) {
    try {
      device_.synchronize(prefetcher_.release_event(plan_->schedule[use].unit));
    } catch (...) {
      // The device keeps its failure and reports it at the application's own synchronize().
    }
  }
  if (plan_ == &plans_.inference()) traffic_.resume();
  plan_ = nullptr;
}

}  // namespace sluice
