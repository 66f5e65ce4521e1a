#include "engine/step/step_loop.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "base/trace/trace_recorder.h"
#include "engine/plan/commit_turn.h"
#include "engine/plan/sharding.h"
#include "engine/run/wait_limit.h"
#include "gpu/cuda/device_math_choice.h"

namespace sluice {

StepLoop::StepLoop(const FlowParts& parts, const CommitStart* durable)
    : config_(parts.config),
      model_(parts.model),
      layout_(parts.layout),
      placement_(parts.placement),
      tiers_(parts.tiers),
      store_(parts.store),
      queue_(parts.queue),
      device_(parts.device),
      scheduler_(parts.scheduler),
      ranks_(parts.ranks),
      worker_(parts.worker),
      guard_(parts.guard),
      versions_(parts.versions),
      update_policy_(parts.config.optimizer, parts.placement.shadow_bytes != 0),
      scaler_(parts.config.precision.loss_scale),
      counts_(parts.queue, parts.config.storage.paths.size(), parts.scheduler),
      cursor_(parts.model, parts.layout, parts.placement),
      math_(parts.placement.uses_device_math() ? make_device_math(parts.device) : nullptr),
      slots_(parts.placement, parts.tiers, parts.store, parts.scheduler,
             parts.layout.blocks().size(), [this] { note_change(); }),
      residents_(parts, [this] { note_change(); }),
      prefetcher_(parts, slots_, residents_,
                  {.window = parts.tiers.window(), .gathers = parts.ranks.gathers()},
                  {.on_change = [this] { note_change(); },
                   .on_final_fetch = [this](UnitId unit) { pass_.fetched(unit); }}),
      announced_(std::ranges::none_of(parts.layout.units(), &UnitPlace::is_announced)
                     ? nullptr
                     : std::make_unique<AnnouncedUnits>(parts, slots_, residents_,
                                                        [this] { note_change(); })),
      waiting_(parts.layout, parts.placement, parts.scheduler),
      drain_(parts, residents_, waiting_, math_.get(),
             [this](UnitId unit) { pass_.gradient_is_final(unit); }),
      home_leases_(parts, [this] { note_change(); }),
      commits_(durable == nullptr
                   ? nullptr
                   : std::make_unique<Commits>(*durable, parts, [this] { note_change(); })),
      saver_(parts, {.is_at_rest = [this](BlockId block) { return !pass_.holds(block); },
                     .on_change = [this] { note_change(); }}),
      pass_(parts,
            {.slots = slots_,
             .residents = residents_,
             .leases = home_leases_,
             .waiting = waiting_,
             .math = math_.get(),
             .commits = commits_.get(),
             .saver = saver_},
            [this] { note_change(); }),
      failure_(pass_, commits_.get(), parts.device, parts.scheduler),
      terms_(parts.config, parts.model, parts.ranks.count()),
      timeline_(parts.layout, parts.device) {
  if (commits_) application_ = commits_->application();
  scheduler_.settle_with([this] { return pump(); });
  scheduler_.run([&] { scheduler_.pools().open(parts.placement); });
}

StepLoop::~StepLoop() {
  scheduler_.settle_with({});
}

// Lets every flow advance that can. A change on the way makes them all check again. One check
// serves a whole batch of tasks: with many small blocks, the scheduler would otherwise spend most
// of its time checking.
bool StepLoop::pump() {
  if (!has_changed_) return false;
  while (std::exchange(has_changed_, false)) {
    pass_.pump();
    if (announced_) announced_->pump();  // first: nothing is known of them earlier
    prefetcher_.pump();
    saver_.pump();
    if (commits_)
      commits_->pump(
          {.is_stored = [this](std::uint64_t version) { return pass_.has_stored(version); },
           .has_unit = [this](std::uint32_t use) { return prefetcher_.is_ready(use); }});
  }
  return true;
}

void StepLoop::begin_step(const StepOptions& options) {
  terms_.check("begin_step", options);
  failure_.throw_if_unusable();
  throw_if_active();
  terms_.begin(options);
  policy_ = update_policy_.choose();
  const UnitCoefficients assumed = terms_.coefficients(
      options, {.step = step_ + 1, .loss_scale = scaler_.scale()}, versions_.all());
  cursor_.begin_training(options.micro_batches, options.order);
  begin();
  scheduler_.run(
      [&] { pass_.announce({.policy = policy_, .version = step_, .coefficients = assumed}); });
}

void StepLoop::begin_inference() {
  drain();
  throw_if_active();
  counts_.pause();
  cursor_.begin_inference();
  begin();
}

void StepLoop::drain() {
  failure_.throw_if_unusable();
  const bool is_between = !is_active();
  if (is_between) timeline_.drain_begins();
  failure_.await([this] {
    const bool is_home = pass_.is_home();
    timeline_.waits_for(kTraceNone, is_home ? WaitCause() : pass_.waits_for());
    return is_home;
  });
  if (is_between) timeline_.drained();
  if (has_undrained_update_) failure_.throw_if_device_failed();
  has_undrained_update_ = false;
}

std::uint64_t StepLoop::applied_step() const {
  bool is_applied = false;
  scheduler_.run([&] { is_applied = pass_.is_applied(); });
  return is_applied ? step_ : step_ - 1;
}

void StepLoop::share_residents() {
  scheduler_.run([this] {
    for (const UnitPlace& unit : layout_.units())
      if (placement_.is_homed_on_device(unit)) residents_.updated(unit.id, prefetcher_.stream());
  });
  failure_.await([this] { return residents_.is_idle(); });
  for (const UnitPlace& unit : layout_.units()) device_.synchronize(residents_.event(unit.id));
  scheduler_.run([this] { (void)residents_.take_gathered_bytes(); });
}

StatePosition StepLoop::position() const {
  StatePosition now{.step = step_, .tensor_updates = versions_.tensor_updates(step_)};
  if (config_.precision.scale_moves()) now.loss_scale = scaler_.state();
  return now;
}

void StepLoop::restore(const StatePosition& position) {
  if (position.loss_scale) scaler_.restore(*position.loss_scale);
  step_ = position.step;
}

void StepLoop::throw_if_active() const {
  if (is_active())
    throw Error(ErrorCode::kInvalidArgument,
                "a step or an inference is still active; finish or destroy it first");
}

// Begins to follow the schedule.
void StepLoop::begin() {
  leases_held_ = acquired_ = acquired_together_ = votes_ = 0;
  open_uses_.clear();
  lease_ends_.begin();
  reductions_.begin();
  uses_.assign(cursor_.schedule().size(), {});
  timeline_.begin(cursor_.schedule(), step_ + 1);
  const bool keeps_for_update =
      policy_ == OverlapPolicy::kEager || policy_ == OverlapPolicy::kSpeculative;
  const bool reduces_each =
      reduces_each_use(ranks_.shard(), terms_.options().micro_batches, terms_.options().order);
  scheduler_.run([&] {
    counts_.count_work_before();
    scheduler_.pools().enter(StepPhase::kForward);
    home_leases_.begin();
    drain_.begin(step_ + 1, reduces_each);
    for (const UnitPlace& unit : layout_.units())
      if (!unit.is_announced) pass_.catch_up(unit);
    prefetcher_.begin(cursor_.schedule(), cursor_.window(), step_, keeps_for_update);
    if (announced_) announced_->begin(step_);
    if (commits_ && !cursor_.is_inference())
      commits_->hold(step_, uses_before_commit(cursor_.schedule(), policy_));
  });
}

void StepLoop::check_acquire(UnitId unit, Pass pass) const {
  const auto fail = [](const std::string& message) {
    throw Error(ErrorCode::kInvalidArgument, "acquire: " + message);
  };
  cursor_.check_use("acquire", pass);
  if (index_of(unit) >= layout_.units().size())
    fail(fmt::format("unit {} does not exist; the model has {}", index_of(unit),
                     layout_.units().size()));
  if ((pass == Pass::kInference) != cursor_.is_inference())
    fail(fmt::format("unit \"{}\": pass \"{}\" does not belong to {}", layout_.unit(unit).name,
                     name_of(pass), cursor_.is_inference() ? "an inference" : "a training step"));
  if (acquired_ >= model_.concurrent_leases) {
    const UseState& earlier = uses_[acquired_ - model_.concurrent_leases];
    if (!earlier.is_released && !earlier.may_stay)
      fail(
          fmt::format("the lease on unit \"{0}\" ({1}) is still held; ModelSpec::concurrent_leases "
                      "is {2}, so a lease has to end before the use that is {2} later",
                      layout_.unit(earlier.scheduled.unit).name, name_of(earlier.scheduled.pass),
                      model_.concurrent_leases));
  }
  if (layout_.unit(unit).is_announced) announced_->check_next(unit, pass);
}

LeasedUse StepLoop::acquire(UnitId unit, Pass pass, StreamId stream) {
  failure_.throw_if_unusable();
  check_acquire(unit, pass);
  const std::uint32_t use = acquired_;
  const bool is_announced = layout_.unit(unit).is_announced;
  const TraceRecord record{.unit = index_of(unit),
                           .kind = TraceKind::kAcquire,
                           .detail = static_cast<std::uint8_t>(pass)};
  const TraceRange range(record);
  timeline_.arrive(use, stream);
  if (!is_announced && !cursor_.expects(unit, pass)) change_schedule(unit, pass);
  UseState& state = uses_[use];
  const bool is_own = is_announced && announced_->is_own(unit);
  state.scheduled = is_announced ? announced_->next(unit) : cursor_.schedule()[cursor_.next()];
  state.fetches = is_announced ? &announced_->fetches_of(unit) : &prefetcher_;
  state.place = is_announced ? announced_->come(unit) : cursor_.next();
  {
    const LimitedWait may_end;
    failure_.await([&] { return is_ready(use); });
  }
  const bool is_resident = placement_.unit_is_on_device(layout_.unit(unit));
  device_.wait(stream, is_resident ? residents_.event(unit) : state.fetches->ready_event(unit));
  timeline_.resume(use, stream,
                   {.scheduled = state.scheduled,
                    .copies = is_resident || state.fetches->is_fetched(state.place),
                    .gather_begun_ns = state.gather_begun_ns});
  LeasedUse lease{.use = use, .unit = unit};
  lease.parameters = cursor_.plans().window_unit_bytes()[index_of(unit)] == 0
                         ? tiers_.leased_home(unit)
                         : state.fetches->place(state.place);
  if (state.gradient_slot) {
    lease.gradients = tiers_.gradient_slot(*state.gradient_slot);
    device_.wait(stream, drain_.zeroed_event(*state.gradient_slot));
  } else if (state.has_gradient_set) {
    lease.gradients = tiers_.gradient_set(unit);
    device_.wait(stream, drain_.set_zeroed_event());
  }
  state.may_stay = layout_.unit(unit).is_pinned && pass != Pass::kBackward;
  state.stream = stream;
  state.range = begin_trace_range(
      {.unit = record.unit, .kind = TraceKind::kCompute, .detail = record.detail});
  if (is_announced) {
    announced_->has_come(unit);
  } else {
    cursor_.advance();
  }
  if (state.has_gradient() && !is_own) reductions_.note(unit);
  open_uses_.push_back(acquired_++);
  acquired_together_ += is_own ? 0 : 1;
  ++leases_held_;
  if (guard_ != nullptr) state.lent = guard_->lend(lease);
  return lease;
}

// On the scheduler's thread: whether everything that `use` needs is on its way to the device.
bool StepLoop::is_ready(std::uint32_t use) {
  UseState& state = uses_[use];
  const ScheduledUse& scheduled = state.scheduled;
  const bool is_queued = residents_.is_queued(scheduled.unit);
  const bool is_fetched = is_queued && state.fetches->is_ready(state.place);
  const bool is_backward = scheduled.pass == Pass::kBackward;
  const bool has_gradient = is_backward && !layout_.unit(scheduled.unit).is_frozen;
  scheduler_.pools().enter(is_backward ? StepPhase::kBackward : StepPhase::kForward);
  WaitCause cause{.reason = is_queued ? TraceReason::kGradientSlot : TraceReason::kCollective,
                  .unit = index_of(scheduled.unit)};
  if (is_fetched) {
    if (has_gradient) state.has_gradient_set = drain_.try_lend_set(scheduled.unit);
    if (has_gradient && !state.has_gradient_set)
      state.gradient_slot = drain_.try_take_slot(scheduled.unit);
    if (!has_gradient || state.has_gradient()) {
      cause = {};
    } else if (drain_.waits_for().reason == TraceReason::kCollective) {
      cause = drain_.waits_for();  // the collective holds the slot
    }
  } else if (is_queued) {
    cause = state.fetches->waits_for();
    if (cause.reason == TraceReason::kUpdate) cause = pass_.waits_for(BlockId{cause.block});
  }
  timeline_.waits_for(use, cause);
  state.gather_begun_ns = placement_.unit_is_on_device(layout_.unit(scheduled.unit))
                              ? residents_.gather_begun_ns(scheduled.unit)
                              : state.fetches->gather_begun_ns(state.place);
  const bool is_ready = is_fetched && (!has_gradient || state.has_gradient());
  if (is_ready) home_leases_.acquired(scheduled.unit);
  return is_ready;
}

// On the scheduler's thread: whether every gradient is final, and the update may be applied.
bool StepLoop::is_over() {
  if (pass_.is_begun()) {  // the update before, which reads the set, has ended
    home_leases_.no_more_gradients();
    drain_.close();
  }
  scheduler_.pools().enter(StepPhase::kOptimizer);
  const bool is_drained = drain_.is_complete() && drain_.idle();
  timeline_.waits_for(kTraceNone, !is_drained         ? drain_.waits_for()
                                  : !pass_.is_begun() ? pass_.waits_for()
                                                      : WaitCause());
  return is_drained && prefetcher_.idle() && (!announced_ || announced_->idle()) &&
         pass_.is_begun();
}

bool StepLoop::is_idle() const {
  return prefetcher_.idle() && (!announced_ || announced_->idle()) && drain_.idle() &&
         residents_.is_idle() && home_leases_.idle() && pass_.idle() && saver_.is_at_rest() &&
         (!commits_ || commits_->is_at_rest());
}

void StepLoop::settle() noexcept {
  scheduler_.run([this] {
    prefetcher_.stop();
    if (announced_) announced_->stop();
    pass_.stop();
    saver_.stop();
    if (commits_) commits_->stop();
  });
  queue_.wait_idle();
  scheduler_.await_settled([this] { return is_idle(); });
}

void StepLoop::abandon() noexcept {
  if (!is_active()) return;
  // The application still holds leases, which from here on refer to nothing.
  for (std::uint32_t use = 0; use < acquired_; ++use)
    if (!uses_[use].is_released) release({.use = use, .unit = uses_[use].scheduled.unit});
  SLUICE_CHECK(leases_held_ == 0, "every lease is of a use");
  timeline_.abandon();
  end_inference_together();
  bool is_partial = false;
  scheduler_.run([&] {
    prefetcher_.stop();
    if (announced_) announced_->stop();
    is_partial = pass_.is_begun() && pass_.is_partial();
    pass_.cancel();
    if (commits_) commits_->release();
  });
  if (is_partial) failure_.abandoned_midway(step_);
  scheduler_.await_settled([this] {
    return store_.is_stuck() || (prefetcher_.idle() && (!announced_ || announced_->idle()) &&
                                 drain_.idle() && !pass_.is_reading_gradients());
  });
  scheduler_.run([this] {
    waiting_.drop_step();
    StepReport dropped;  // of no step
    prefetcher_.take_moved(dropped);
    if (announced_) announced_->take_moved(dropped);
    (void)drain_.take_copied_bytes();
    if (cursor_.is_inference()) (void)pass_.take_late_bytes();
  });
  if (ranks_.are_several() && !cursor_.is_inference())
    failure_.abandoned_alone(step_, ranks_.rank(), ranks_.count());
  lease_ends_.await(device_);  // the window's bytes may be overwritten next
  if (cursor_.is_inference()) counts_.resume();
  cursor_.end(/*is_example=*/cursor_.is_inference());
}

}  // namespace sluice
