#include "engine/run/step_timeline.h"

#include <algorithm>

#include <sluice/error.h>

namespace sluice {
namespace {

// Changes of cause in one step; more than a few per use would be noise. Each use, and the step's
// end, has some for itself. Units with many blocks take more, as long as there are others.
constexpr std::size_t kSegmentsAUse = 16;
constexpr std::size_t kOwnSegmentsAUse = 8;

}  // namespace

void StepTimeline::begin(const Schedule& schedule, std::uint64_t step) {
  const std::scoped_lock lock(mutex_);
  is_training_ = schedule.empty() || schedule.front().pass != Pass::kInference;
  step_ = step;
  begin_ns_ = steady_now_ns();
  arrived_ = resumed_ = 0;
  last_release_.reset();
  changed_use_ = kTraceNone;
  segments_.clear();
  expected_uses_ = schedule.size();
  segments_.reserve(kSegmentsAUse * (expected_uses_ + 1));
  phase_ = Phase::kComputing;
  next_use_ = 0;
  next_segment_ = 0;
  next_pause_ = 0;
  computed_use_ = kTraceNone;
  pauses_.clear();
  cursor_ns_ = begin_ns_;
  offset_ns_ = INT64_MIN;
  announced_ns_ = 0;
  times_ = {};
  computed_.resize(layout_.units().size());
  if (!is_training_) return;
  trace_begin({.begin_ns = begin_ns_, .step = step_, .kind = TraceKind::kStep});
  range_ = begin_trace_range({.step = step_, .kind = TraceKind::kStep});
}

void StepTimeline::abandon() {
  const std::scoped_lock lock(mutex_);
  is_training_ = false;
  end_trace_range(range_);
}

void StepTimeline::drain_begins() {
  const std::scoped_lock lock(mutex_);
  segments_.clear();
  next_segment_ = 0;
  cursor_ns_ = steady_now_ns();
}

void StepTimeline::drained() {
  const std::scoped_lock lock(mutex_);
  if (segments_.empty()) return;
  // Hand-overs to the scheduler's thread and back are part of the wait.
  segments_.front().begin_ns = cursor_ns_;
  segments_.back().end_ns = steady_now_ns();
  add_segments(kTraceNone, segments_.back().end_ns);
}

void StepTimeline::change() {
  const std::scoped_lock lock(mutex_);
  changed_use_ = resumed_;
}

void StepTimeline::lengthen(std::size_t uses) {
  const std::scoped_lock lock(mutex_);
  expected_uses_ += uses;
  segments_.reserve(kSegmentsAUse * (expected_uses_ + 1));
}

void StepTimeline::arrive(std::uint32_t use, StreamId stream) {
  const std::scoped_lock lock(mutex_);
  if (arrived_ == use + 1) return;  // the same wait goes on (engine/run/wait_limit.h)
  while (uses_.size() <= use)
    uses_.push_back({.arrived = Event(device_), .resumed = Event(device_), .how = {}});
  uses_[use].arrive_called_ns = steady_now_ns();
  device_.record(uses_[use].arrived.id(), stream);
  arrived_ = use + 1;
}

void StepTimeline::resume(std::uint32_t use, StreamId stream, const Resumption& how) {
  const std::scoped_lock lock(mutex_);
  Use& of = uses_[use];
  of.how = how;
  of.resume_called_ns = steady_now_ns();
  device_.record(of.resumed.id(), stream);
  resumed_ = use + 1;
  trace_span({.begin_ns = of.arrive_called_ns,
              .end_ns = of.resume_called_ns,
              .step = step_,
              .unit = index_of(of.how.scheduled.unit),
              .use = use,
              .kind = TraceKind::kAcquire,
              .detail = static_cast<std::uint8_t>(of.how.scheduled.pass)});
}

void StepTimeline::pause(EventId asked, EventId granted, const WaitCause& cause) {
  const std::scoped_lock lock(mutex_);
  if (is_training_ && resumed_ != 0)
    pauses_.push_back({.asked = asked, .granted = granted, .use = resumed_ - 1, .cause = cause});
}

void StepTimeline::waits_for(std::uint32_t use, WaitCause cause) {
  const std::scoped_lock lock(mutex_);
  if (use == changed_use_ && use != kTraceNone && cause.reason != TraceReason::kNone)
    cause.reason = TraceReason::kSchedule;
  const bool is_open = !segments_.empty() && segments_.back().end_ns == 0;
  const bool goes_on = is_open && segments_.back().use == use;
  if (goes_on && segments_.back().cause == cause) return;
  const std::size_t left = segments_left(use);
  if (goes_on && cause.reason != TraceReason::kNone) {
    // The last cause goes on. The use's own segments are for other reasons, not for other blocks.
    const WaitCause& last = segments_.back().cause;
    const bool is_other_block = last == WaitCause{cause.reason, cause.unit, last.block};
    if (left <= (is_other_block ? kOwnSegmentsAUse : 0)) return;
  }
  const std::uint64_t now_ns = steady_now_ns();
  close_segment(now_ns);
  if (cause.reason == TraceReason::kNone || left == 0) return;
  segments_.push_back({.use = use, .cause = cause, .begin_ns = now_ns});
}

// The segments that `use` may still add, so that those after it and the step's end have their own.
std::size_t StepTimeline::segments_left(std::uint32_t use) const {
  const std::size_t later =
      use == kTraceNone ? 0 : std::max<std::size_t>(expected_uses_, use + 1) - use;
  const std::size_t taken = segments_.size() + kOwnSegmentsAUse * later;
  return segments_.capacity() - std::min(segments_.capacity(), taken);
}

void StepTimeline::close_segment(std::uint64_t now_ns) {
  if (!segments_.empty() && segments_.back().end_ns == 0) segments_.back().end_ns = now_ns;
}

std::int64_t StepTimeline::device_ns(EventId event) const {
  return device_.elapsed_ns(uses_.front().arrived.id(), event);
}

// An event comes after the call that records it, and right after it when its stream is idle, as in
// a stall. So the largest distance between call and event is closest to the truth.
void StepTimeline::refine_offset(std::uint64_t called_ns, const Event& event) {
  offset_ns_ = std::max(offset_ns_, static_cast<std::int64_t>(called_ns) - device_ns(event.id()));
}

// On a stream that no gradient waits for, an event may still be pending when the step is over.
std::uint64_t StepTimeline::time_of(EventId event, std::uint64_t now_ns) const {
  if (offset_ns_ == INT64_MIN || !device_.is_complete(event)) return now_ns;
  return std::clamp(static_cast<std::uint64_t>(offset_ns_ + device_ns(event)), cursor_ns_, now_ns);
}

// Completed events give the clocks' offset, which then places them.
void StepTimeline::advance(std::uint64_t now_ns, bool all) {
  for (std::uint32_t use = next_use_; use < arrived_; ++use) {
    const Use& of = uses_[use];
    if (!device_.is_complete(of.arrived.id())) break;
    refine_offset(of.arrive_called_ns, of.arrived);
    if (use == resumed_ || !device_.is_complete(of.resumed.id())) break;
    refine_offset(of.resume_called_ns, of.resumed);
  }
  while (advance_once(now_ns, all)) {
  }
}

bool StepTimeline::advance_once(std::uint64_t now_ns, bool all) {
  const auto has_come = [&](EventId event) { return all || device_.is_complete(event); };
  switch (phase_) {
    case Phase::kComputing: {
      if (!lay_pauses(now_ns, all)) return false;
      const bool is_last = next_use_ == arrived_;
      if (is_last && !last_release_) return false;
      const EventId end = is_last ? *last_release_ : uses_[next_use_].arrived.id();
      if (!has_come(end)) return false;
      const std::uint64_t end_ns =
          next_use_ == 0 && is_last ? cursor_ns_ : time_of(end, now_ns);  // nothing was computed
      if (next_use_ != 0) add_compute(next_use_ - 1, cursor_ns_, end_ns);
      cursor_ns_ = end_ns;
      phase_ = is_last ? Phase::kEnding : Phase::kStalled;
      return true;
    }
    case Phase::kStalled: {
      if (next_use_ == resumed_ || !has_come(uses_[next_use_].resumed.id())) {
        add_segments(next_use_, now_ns);
        return false;
      }
      const Use& use = uses_[next_use_];
      const std::uint64_t end_ns = time_of(use.resumed.id(), now_ns);
      add_segments(next_use_, end_ns);
      const WaitCause copies{.reason = use.how.copies ? TraceReason::kCopy : TraceReason::kNone,
                             .unit = index_of(use.how.scheduled.unit)};
      const std::uint64_t begun_ns =
          use.how.gather_begun_ns == nullptr ? 0 : use.how.gather_begun_ns->load();
      const std::uint64_t gather_ns =
          begun_ns == 0 ? end_ns : std::clamp(begun_ns, cursor_ns_, end_ns);
      add_wait(copies, next_use_, cursor_ns_, gather_ns);
      add_wait(copies.with(TraceReason::kCollective), next_use_, gather_ns, end_ns);
      cursor_ns_ = end_ns;
      phase_ = Phase::kComputing;
      ++next_use_;
      return true;
    }
    case Phase::kEnding: add_segments(kTraceNone, now_ns); return false;
  }
  return false;
}

// Returns false while one has not ended.
bool StepTimeline::lay_pauses(std::uint64_t now_ns, bool all) {
  for (; next_pause_ < pauses_.size() && pauses_[next_pause_].use + 1 == next_use_; ++next_pause_) {
    const Pause& pause = pauses_[next_pause_];
    if (!all && !device_.is_complete(pause.granted)) return false;
    const std::uint64_t asked_ns = time_of(pause.asked, now_ns);
    if (asked_ns > cursor_ns_) add_compute(pause.use, cursor_ns_, asked_ns);
    cursor_ns_ = asked_ns;
    const std::uint64_t granted_ns = time_of(pause.granted, now_ns);
    add_wait(pause.cause, pause.use, cursor_ns_, granted_ns);
    cursor_ns_ = granted_ns;
  }
  return true;
}

void StepTimeline::ends(EventId last_release) {
  const std::scoped_lock lock(mutex_);
  const std::uint64_t now_ns = steady_now_ns();
  close_segment(now_ns);
  last_release_ = last_release;
  if (arrived_ == resumed_) return;
  // The last acquire() has failed without a retry: its waits belong to no use.
  arrived_ = resumed_;
  if (phase_ == Phase::kStalled && next_use_ == resumed_) {
    add_segments(next_use_, now_ns);
    phase_ = Phase::kEnding;
  }
  while (segments_.size() > next_segment_ && segments_.back().use == resumed_) segments_.pop_back();
}

StepTimes StepTimeline::finish(std::uint64_t finish_ns, const WorkTimes& work) {
  const std::scoped_lock lock(mutex_);
  SLUICE_CHECK(last_release_.has_value(), "a step is over when it knows its end");
  const std::uint64_t end_ns = steady_now_ns();
  close_segment(end_ns);
  advance(end_ns, /*all=*/true);
  add_wait({}, kTraceNone, cursor_ns_, end_ns);
  is_training_ = false;
  end_trace_range(range_);
  ++steps_computed_;
  times_.total_ns = static_cast<std::int64_t>(end_ns - begin_ns_);
  times_.work = work;
  times_.other_ns = times_.total_ns - times_.compute_ns - times_.exposed_ns();
  trace_span({.begin_ns = begin_ns_,
              .end_ns = end_ns,
              .size_bytes = static_cast<std::uint64_t>(work.any_ns),
              .step = step_,
              .kind = TraceKind::kStep});
  trace_span({.begin_ns = finish_ns, .end_ns = end_ns, .step = step_, .kind = TraceKind::kFinish});
  return times_;
}

// Runs on the drainer's thread.
void StepTimeline::poll() {
  const std::scoped_lock lock(mutex_);
  if (!is_training_) return;
  try {
    const std::uint64_t now_ns = steady_now_ns();
    advance(now_ns, /*all=*/false);
    announce(now_ns);
  } catch (const Error&) {
    // The device has failed, and reports that itself to its users.
  }
}

// Announces each span that has begun and not ended, once.
void StepTimeline::announce(std::uint64_t now_ns) {
  TraceRecord open{.begin_ns = cursor_ns_, .step = step_, .kind = TraceKind::kWait};
  if (phase_ == Phase::kComputing) {
    if (next_use_ == 0) return;
    const ScheduledUse& scheduled = uses_[next_use_ - 1].how.scheduled;
    open.unit = index_of(scheduled.unit);
    open.use = next_use_ - 1;
    open.kind = TraceKind::kCompute;
    open.detail = static_cast<std::uint8_t>(scheduled.pass);
  } else {
    open.use = phase_ == Phase::kStalled ? next_use_ : kTraceNone;
    WaitCause cause;
    if (next_segment_ < segments_.size() && segments_[next_segment_].use == open.use) {
      cause = segments_[next_segment_].cause;
      open.begin_ns = std::max(cursor_ns_, segments_[next_segment_].begin_ns);
    } else if (phase_ == Phase::kStalled && next_use_ < resumed_ && uses_[next_use_].how.copies) {
      cause = {.reason = TraceReason::kCopy, .unit = index_of(uses_[next_use_].how.scheduled.unit)};
    }
    open.unit = cause.unit;
    open.block = cause.block;
    open.reason = cause.reason;
  }
  // There is one at a time: a later one has a later begin.
  if (open.begin_ns <= announced_ns_ || open.begin_ns >= now_ns) return;
  announced_ns_ = open.begin_ns;
  trace_begin(open);
}

void StepTimeline::add_compute(std::uint32_t use, std::uint64_t begin_ns, std::uint64_t end_ns) {
  times_.compute_ns += static_cast<std::int64_t>(end_ns - begin_ns);
  const ScheduledUse& scheduled = uses_[use].how.scheduled;
  trace_span({.begin_ns = begin_ns,
              .end_ns = end_ns,
              .step = step_,
              .unit = index_of(scheduled.unit),
              .use = use,
              .kind = TraceKind::kCompute,
              .detail = static_cast<std::uint8_t>(scheduled.pass)});
  if (steps_computed_ == 0) return;  // the first step touches memory for the first time
  Computed& unit = computed_[index_of(scheduled.unit)];
  const double seconds = static_cast<double>(end_ns - begin_ns) * 1e-9;
  const bool is_new = use != computed_use_;  // not the part after a pause
  computed_use_ = use;
  if (scheduled.pass == Pass::kBackward) {
    unit.backward_s += seconds;
    unit.backward_uses += is_new ? 1 : 0;
  } else {
    unit.forward_s += seconds;
    unit.forward_uses += is_new ? 1 : 0;
  }
}

void StepTimeline::add_wait(const WaitCause& cause, std::uint32_t use, std::uint64_t begin_ns,
                            std::uint64_t end_ns) {
  if (end_ns <= begin_ns) return;
  const auto duration_ns = static_cast<std::int64_t>(end_ns - begin_ns);
  times_.wait_ns[static_cast<std::size_t>(cause.reason)] += duration_ns;
  const Blame blame = blame_of(cause.reason);
  if (use != kTraceNone) {
    times_.stall_ns += duration_ns;
    if (blame == Blame::kOptimizer) times_.stall_for_update_ns += duration_ns;
  }
  switch (blame) {
    case Blame::kIo: times_.exposed_io_ns += duration_ns; break;
    case Blame::kOptimizer: times_.exposed_optimizer_ns += duration_ns; break;
    case Blame::kOther: break;
  }
  trace_span({.begin_ns = begin_ns,
              .end_ns = end_ns,
              .step = step_,
              .unit = cause.unit,
              .block = cause.block,
              .use = use,
              .kind = TraceKind::kWait,
              .reason = cause.reason,
              .detail = is_training_ ? std::uint8_t{0} : kTraceAfterStep});
}

// Lays the ended segments of `use` over its stall, which lasts until `end_ns` or longer. The time
// between them is the engine's own latency, unless it has changed its plan.
void StepTimeline::add_segments(std::uint32_t use, std::uint64_t end_ns) {
  WaitCause between;
  if (use == changed_use_ && use != kTraceNone) between.reason = TraceReason::kSchedule;
  for (; next_segment_ < segments_.size() && segments_[next_segment_].end_ns != 0 &&
         segments_[next_segment_].use == use;
       ++next_segment_) {
    const Segment& segment = segments_[next_segment_];
    const std::uint64_t from_ns = std::clamp(segment.begin_ns, cursor_ns_, end_ns);
    const std::uint64_t to_ns = std::clamp(segment.end_ns, from_ns, end_ns);
    add_wait(between, use, cursor_ns_, from_ns);
    add_wait(segment.cause, use, from_ns, to_ns);
    cursor_ns_ = to_ns;
  }
}

std::vector<UnitTime> StepTimeline::unit_times() const {
  const std::scoped_lock lock(mutex_);
  std::vector<UnitTime> times;
  if (steps_computed_ < 2) return times;
  for (const Computed& unit : computed_) {
    const auto mean = [](double sum_s, std::uint64_t uses) {
      return uses == 0 ? 0 : sum_s / static_cast<double>(uses);
    };
    times.push_back({.forward_s = mean(unit.forward_s, unit.forward_uses),
                     .backward_s = mean(unit.backward_s, unit.backward_uses)});
  }
  return times;
}

}  // namespace sluice
