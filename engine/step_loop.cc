#include "engine/step_loop.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "base/trace.h"

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
      course_(model, layout, placement),
      slots_(placement, tiers, store, layout.blocks().size(), [this] { pump(); }),
      prefetcher_(layout, placement, tiers, slots_, store, device, scheduler,
                  {.on_change = [this] { pump(); },
                   .on_final_fetch = [this](UnitId unit) { pass_.fetched(unit); }}),
      drain_(layout, placement, tiers, device, scheduler, worker,
             [this](UnitId unit) { pass_.gradient_is_final(unit); }),
      pass_(layout, placement, tiers, slots_, store, device, scheduler, worker, model.forward_order,
            [this] { pump(); }),
      failure_(pass_, device, scheduler) {}

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

void StepLoop::begin_step(const StepOptions& options) {
  if (!(options.learning_rate >= 0) || !std::isfinite(options.learning_rate))
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("begin_step: learning_rate is {}; it must be finite and not negative",
                            options.learning_rate));
  if (options.micro_batches == 0)
    throw Error(ErrorCode::kInvalidArgument,
                "begin_step: micro_batches is 0; a step has at least one");
  failure_.throw_if_unusable();
  options_ = options;
  policy_ = update_policy_.choose();
  const StepCoefficients assumed = coefficients(/*clip_factor=*/1);
  throw_if_active();
  course_.begin_training(options.micro_batches, options.order);
  begin();
  scheduler_.run(
      [&] { pass_.announce({.policy = policy_, .version = step_, .coefficients = assumed}); });
}

void StepLoop::begin_inference() {
  drain();
  throw_if_active();
  traffic_.pause();
  course_.begin_inference();
  begin();
}

void StepLoop::drain() {
  failure_.throw_if_unusable();
  failure_.await([this] { return pass_.is_home(); });
  if (std::exchange(has_undrained_update_, false)) failure_.throw_if_device_failed();
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

void StepLoop::throw_if_active() const {
  if (is_active())
    throw Error(ErrorCode::kInvalidArgument,
                "a step or an inference is still active; finish or destroy it first");
}

// Along the course.
void StepLoop::begin() {
  leases_held_ = 0;
  uses_.assign(course_.schedule().size(), {});
  make_events();
  const bool keeps_for_update =
      policy_ == OverlapPolicy::kEager || policy_ == OverlapPolicy::kSpeculative;
  scheduler_.run([&] {
    drain_.begin(step_ + 1);
    prefetcher_.begin(course_.schedule(), course_.window(), step_, keeps_for_update);
  });
}

void StepLoop::make_events() {
  while (arrived_events_.size() < course_.schedule().size()) {
    arrived_events_.emplace_back(device_);
    resumed_events_.emplace_back(device_);
  }
}

void StepLoop::check_acquire(UnitId unit, Pass pass) const {
  const auto fail = [](const std::string& message) {
    throw Error(ErrorCode::kInvalidArgument, "acquire: " + message);
  };
  if (!is_active()) fail("no step is active");
  if (index_of(unit) >= layout_.units().size())
    fail(fmt::format("unit {} does not exist; the model has {}", index_of(unit),
                     layout_.units().size()));
  if ((pass == Pass::kInference) != course_.is_inference())
    fail(fmt::format("unit \"{}\": pass \"{}\" does not belong to {}", layout_.unit(unit).name,
                     name_of(pass), course_.is_inference() ? "an inference" : "a training step"));
  if (course_.next() >= model_.concurrent_leases &&
      !uses_[course_.next() - model_.concurrent_leases].is_released)
    fail(fmt::format("the lease on {} is still held; ModelSpec::concurrent_leases is {}",
                     course_.describe(course_.next() - model_.concurrent_leases),
                     model_.concurrent_leases));
}

// Computation leaves the schedule. What has been fetched ahead stays where it may still be of use,
// and the rest of the step is planned anew around it.
void StepLoop::change_schedule(UnitId unit, Pass pass) {
  bool is_closed = false;
  scheduler_.run([&] { is_closed = drain_.is_closed(unit); });
  if (policy_ == OverlapPolicy::kEager && is_closed && !course_.is_inference())
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("acquire: unit \"{}\" ({}) is used after what the schedule calls its last "
                    "backward use of the step, and optimizer.overlap \"eager\" may have updated it "
                    "by then; declare the use in ModelSpec::backward_order, or set "
                    "optimizer.overlap to \"deferred\"",
                    layout_.unit(unit).name, name_of(pass)));
  WindowProgress progress;
  scheduler_.run([this] { prefetcher_.stop(); });
  failure_.await([&] {
    progress = prefetcher_.progress(course_.next());
    return prefetcher_.idle();
  });
  try {
    follow(course_.changed(progress, unit, pass));
  } catch (const Error&) {
    scheduler_.run(
        [this] { prefetcher_.resume(course_.schedule(), course_.window(), course_.next()); });
    throw;
  }
}

// What the schedule still expects will not come.
void StepLoop::end_schedule() {
  scheduler_.run([this] { prefetcher_.stop(); });
  failure_.await([this] { return prefetcher_.idle(); });
  follow(course_.ended());
}

void StepLoop::follow(StepPlan plan) {
  update_policy_.note_schedule_change();
  scheduler_.run([&] {
    course_.follow(std::move(plan));
    uses_.resize(course_.schedule().size());
    prefetcher_.resume(course_.schedule(), course_.window(), course_.next());
  });
  make_events();
}

LeasedUse StepLoop::acquire(UnitId unit, Pass pass, StreamId stream) {
  failure_.throw_if_unusable();
  check_acquire(unit, pass);
  if (!course_.expects(unit, pass)) change_schedule(unit, pass);
  const std::uint64_t begin_ns = steady_now_ns();
  const std::uint32_t use = course_.next();
  const bool has_gradient = pass == Pass::kBackward && !layout_.unit(unit).is_frozen;
  UseState& state = uses_[use];
  device_.record(arrived_events_[use].id(), stream);
  std::uint64_t update_awaited_ns = 0;  // last seen
  failure_.await([&] {
    if (prefetcher_.awaits_update()) update_awaited_ns = steady_now_ns();
    if (!prefetcher_.is_ready(use)) return false;
    if (has_gradient) state.gradient_slot = drain_.try_take_slot();
    return !has_gradient || state.gradient_slot.has_value();
  });
  if (update_awaited_ns > begin_ns)
    state.update_wait_ns = static_cast<std::int64_t>(update_awaited_ns - begin_ns);
  device_.wait(stream, placement_.unit_is_on_device(layout_.unit(unit))
                           ? pass_.resident_event(unit)
                           : prefetcher_.ready_event(unit));
  device_.record(resumed_events_[use].id(), stream);
  LeasedUse lease{.use = use, .unit = unit};
  lease.parameters = course_.plans().window_unit_bytes()[index_of(unit)] == 0
                         ? tiers_.resident_parameters(unit)
                         : tiers_.window() + course_.window().uses[use].offset_bytes;
  if (state.gradient_slot) {
    lease.gradients = tiers_.gradient_slot(*state.gradient_slot);
    device_.fill_zero(lease.gradients, layout_.unit_gradient_bytes(unit), stream);
  }
  state.stream = stream;
  course_.advance();
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
    const ScheduledUse& scheduled = course_.schedule()[use];
    if (uses_[use].gradient_slot)
      drain_.release(scheduled, *uses_[use].gradient_slot,
                     prefetcher_.release_event(scheduled.unit));
    prefetcher_.release(use);
  });
}

StepReport StepLoop::finish_step() {
  failure_.throw_if_unusable();
  if (!is_active()) throw Error(ErrorCode::kInvalidArgument, "finish: no step is active");
  if (leases_held_ != 0)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("finish: the step is not over: {} leases are held", leases_held_));
  if (!course_.has_been_backward())
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("finish: no unit has been through backward in this step; the schedule "
                            "expects {} next",
                            course_.describe(course_.next())));
  const std::uint64_t begin_ns = steady_now_ns();
  if (!course_.is_over()) end_schedule();
  scheduler_.run([this] { drain_.close(); });
  failure_.await([this] {
    return drain_.is_complete() && drain_.idle() && prefetcher_.idle() && pass_.is_begun();
  });
  // What came after the last gradient, nobody has waited for yet.
  std::uint32_t rest = course_.next();
  while (rest > 0 && !uses_[rest - 1].gradient_slot) --rest;
  await_computation(rest);
  failure_.throw_if_device_failed();
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
  describe_changes(report);
  course_.end(/*is_example=*/true);
  if (trace_enabled())
    trace_record(
        {.begin_ns = begin_ns, .end_ns = end_ns, .step = report.step, .kind = TraceKind::kFinish});
  return report;
}

void StepLoop::describe_changes(StepReport& report) const {
  report.schedule_changes = course_.changes();
  if (course_.changes() != 0)
    report.notes.push_back(
        fmt::format("step {}: units were not used as scheduled ({} changes, each a wait); the next "
                    "such step is expected to go like this one",
                    step_, course_.changes()));
  if (const std::uint32_t units = drain_.units_without_gradient(); units != 0)
    report.notes.push_back(fmt::format(
        "step {}: {} of {} units were not used in backward; their gradient was taken to be zero",
        step_, units, layout_.units().size()));
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
  const bool as_assumed = report.clip_factor == 1 && !drain_.was_reopened();
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
  for (std::size_t use = 0; use < course_.schedule().size(); ++use) {
    const std::int64_t stall_ns =
        device_.elapsed_ns(arrived_events_[use].id(), resumed_events_[use].id());
    report.stall_ns += stall_ns;
    report.stall_for_update_ns += std::min(stall_ns, uses_[use].update_wait_ns);
  }
}

bool StepLoop::is_idle() const {
  return prefetcher_.idle() && drain_.idle() && pass_.idle();
}

void StepLoop::settle() noexcept {
  scheduler_.run([this] {
    prefetcher_.stop();
    pass_.stop();
  });
  queue_.wait_idle();
  scheduler_.await_settled([this] { return is_idle(); });
}

// The window's bytes may be overwritten next: nothing may compute on them any more.
void StepLoop::await_computation(std::uint32_t first_use) noexcept {
  for (std::uint32_t use = first_use; use < course_.next(); ++use) {
    try {
      device_.synchronize(prefetcher_.release_event(course_.schedule()[use].unit));
    } catch (...) {
      // The device keeps its failure and reports it at the application's own synchronize().
    }
  }
}

void StepLoop::abandon() noexcept {
  if (!is_active()) return;
  SLUICE_CHECK(leases_held_ == 0, "leases end before the step that gave them");
  bool is_partial = false;
  scheduler_.run([&] {
    prefetcher_.stop();
    is_partial = pass_.is_begun() && pass_.is_partial();
    pass_.cancel();
  });
  if (is_partial) failure_.abandoned_midway(step_);
  scheduler_.await_settled(
      [this] { return store_.is_stuck() || (prefetcher_.idle() && drain_.idle()); });
  await_computation(0);
  if (course_.is_inference()) traffic_.resume();
  course_.end(/*is_example=*/course_.is_inference());
}

}  // namespace sluice
