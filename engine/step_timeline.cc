#include "engine/step_timeline.h"

#include <algorithm>
#include <iterator>

namespace sluice {
namespace {

// Changes of cause in one step, of which more than a few for each use would be noise.
constexpr std::size_t kSegmentsAUse = 8;

enum class Blame : std::uint8_t { kIo, kOptimizer, kOther };

Blame blame_of(TraceReason reason) {
  switch (reason) {
    case TraceReason::kRead:
    case TraceReason::kSlot:
    case TraceReason::kWindow:
    case TraceReason::kCopy:
    case TraceReason::kGradientSlot:
    case TraceReason::kGradientCopy:
    case TraceReason::kGradientSpill:
    case TraceReason::kCollective:
    case TraceReason::kSchedule: return Blame::kIo;
    case TraceReason::kUpdateRead:
    case TraceReason::kUpdateLane:
    case TraceReason::kUpdate:
    case TraceReason::kUpdateWrite:
    case TraceReason::kNorm: return Blame::kOptimizer;
    case TraceReason::kNone: return Blame::kOther;
  }
  return Blame::kOther;
}

}  // namespace

double StepTimes::hidden_share() const {
  if (work.any_ns <= 0) return 1;
  const double exposed = static_cast<double>(exposed_ns()) / static_cast<double>(work.any_ns);
  return std::clamp(1 - exposed, 0.0, 1.0);
}

void StepTimeline::begin(const Schedule& schedule, std::uint64_t step) {
  schedule_ = &schedule;
  step_ = step;
  begin_ns_ = steady_now_ns();
  arrived_ = 0;
  changed_use_ = kTraceNone;
  segments_.clear();
  segments_.reserve(kSegmentsAUse * (schedule.size() + 1));
}

void StepTimeline::follow(const Schedule& schedule) {
  schedule_ = &schedule;
  changed_use_ = arrived_;
}

void StepTimeline::arrive(std::uint32_t use, StreamId stream) {
  while (uses_.size() <= use)
    uses_.push_back({.arrived = Event(device_), .resumed = Event(device_)});
  uses_[use].arrive_called_ns = steady_now_ns();
  device_.record(uses_[use].arrived.id(), stream);
}

void StepTimeline::resume(std::uint32_t use, StreamId stream, bool copies) {
  uses_[use].resume_called_ns = steady_now_ns();
  uses_[use].copies = copies;
  device_.record(uses_[use].resumed.id(), stream);
  arrived_ = use + 1;
  trace_span({.begin_ns = uses_[use].arrive_called_ns,
              .end_ns = uses_[use].resume_called_ns,
              .step = step_,
              .unit = index_of((*schedule_)[use].unit),
              .use = use,
              .kind = TraceKind::kAcquire,
              .detail = static_cast<std::uint8_t>((*schedule_)[use].pass)});
}

void StepTimeline::waits_for(std::uint32_t use, WaitCause cause) {
  if (use == changed_use_ && use != kTraceNone && cause.reason != TraceReason::kNone)
    cause.reason = TraceReason::kSchedule;
  const bool is_open = !segments_.empty() && segments_.back().end_ns == 0;
  if (is_open && segments_.back().use == use && segments_.back().cause == cause) return;
  // Full: what comes goes on under the last name. Only a change of causes hundreds of times a use
  // gets here.
  if (is_open && cause.reason != TraceReason::kNone && segments_.back().use == use &&
      segments_.size() == segments_.capacity())
    return;
  const std::uint64_t now_ns = steady_now_ns();
  if (is_open) segments_.back().end_ns = now_ns;
  if (cause.reason == TraceReason::kNone || segments_.size() == segments_.capacity()) return;
  segments_.push_back({.use = use, .cause = cause, .begin_ns = now_ns});
}

std::int64_t StepTimeline::device_ns(const Event& event) const {
  return device_.elapsed_ns(uses_.front().arrived.id(), event.id());
}

// From device_ns() to the steady clock. An event comes after the call that records it, and right
// after it when its stream is idle, as it is in a stall: so the largest distance between call and
// event is the closest to the truth.
std::uint64_t StepTimeline::host_offset_ns() const {
  std::int64_t offset = INT64_MIN;
  for (std::uint32_t use = 0; use < arrived_; ++use) {
    const Use& of = uses_[use];
    offset =
        std::max({offset, static_cast<std::int64_t>(of.arrive_called_ns) - device_ns(of.arrived),
                  static_cast<std::int64_t>(of.resume_called_ns) - device_ns(of.resumed)});
  }
  return static_cast<std::uint64_t>(offset);
}

StepTimes StepTimeline::finish(EventId last_release, std::uint64_t finish_ns, const WorkTimes& work,
                               const std::function<std::uint64_t(std::uint32_t)>& gather_begun_ns) {
  ready();
  const std::uint64_t end_ns = steady_now_ns();
  times_ = {.total_ns = static_cast<std::int64_t>(end_ns - begin_ns_), .work = work};
  computed_.resize(layout_.units().size());
  next_segment_ = 0;
  std::uint64_t cursor_ns = begin_ns_;
  const std::uint64_t offset_ns = arrived_ == 0 ? 0 : host_offset_ns();
  const auto time_of = [&](std::int64_t at_ns) {
    return std::clamp(offset_ns + static_cast<std::uint64_t>(at_ns), cursor_ns, end_ns);
  };
  for (std::uint32_t use = 0; use < arrived_; ++use) {
    const std::uint64_t arrived_ns = time_of(device_ns(uses_[use].arrived));
    if (use != 0) add_compute(use - 1, cursor_ns, arrived_ns);
    cursor_ns = arrived_ns;
    const std::uint64_t resumed_ns = time_of(device_ns(uses_[use].resumed));
    const WaitCause copies{.reason = uses_[use].copies ? TraceReason::kCopy : TraceReason::kNone,
                           .unit = index_of((*schedule_)[use].unit)};
    add_stall(use, arrived_ns, resumed_ns, copies, gather_begun_ns(use));
    cursor_ns = resumed_ns;
  }
  if (arrived_ != 0) {
    const std::uint64_t released_ns =
        device_.is_complete(last_release)
            ? time_of(device_.elapsed_ns(uses_.front().arrived.id(), last_release))
            : end_ns;
    add_compute(arrived_ - 1, cursor_ns, released_ns);
    add_stall(kTraceNone, released_ns, end_ns, {});
  }
  ++steps_computed_;
  times_.other_ns = times_.total_ns - times_.compute_ns - times_.exposed_ns();
  trace_span({.begin_ns = begin_ns_, .end_ns = end_ns, .step = step_, .kind = TraceKind::kStep});
  trace_span({.begin_ns = finish_ns, .end_ns = end_ns, .step = step_, .kind = TraceKind::kFinish});
  return times_;
}

void StepTimeline::add_compute(std::uint32_t use, std::uint64_t begin_ns, std::uint64_t end_ns) {
  times_.compute_ns += static_cast<std::int64_t>(end_ns - begin_ns);
  const ScheduledUse& scheduled = (*schedule_)[use];
  trace_span({.begin_ns = begin_ns,
              .end_ns = end_ns,
              .step = step_,
              .unit = index_of(scheduled.unit),
              .use = use,
              .kind = TraceKind::kCompute,
              .detail = static_cast<std::uint8_t>(scheduled.pass)});
  if (steps_computed_ == 0) return;  // touches memory for the first time
  Computed& unit = computed_[index_of(scheduled.unit)];
  const double seconds = static_cast<double>(end_ns - begin_ns) * 1e-9;
  if (scheduled.pass == Pass::kBackward) {
    unit.backward_s += seconds;
    ++unit.backward_uses;
  } else {
    unit.forward_s += seconds;
    ++unit.forward_uses;
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
              .reason = cause.reason});
}

// Lays the segments of `use` over its stall; what none of them covers in the middle is the
// engine's own latency, unless it has changed its plan. What comes after the last is `rest`, and
// from the beginning of a gather on the other ranks.
void StepTimeline::add_stall(std::uint32_t use, std::uint64_t begin_ns, std::uint64_t end_ns,
                             const WaitCause& rest, std::uint64_t gather_begun_ns) {
  WaitCause between;
  if (use == changed_use_ && use != kTraceNone) between.reason = TraceReason::kSchedule;
  std::uint64_t cursor_ns = begin_ns;
  for (; next_segment_ < segments_.size() && segments_[next_segment_].use == use; ++next_segment_) {
    const Segment& segment = segments_[next_segment_];
    const std::uint64_t from_ns = std::clamp(segment.begin_ns, cursor_ns, end_ns);
    const std::uint64_t to_ns = std::clamp(segment.end_ns, from_ns, end_ns);
    add_wait(between, use, cursor_ns, from_ns);
    add_wait(segment.cause, use, from_ns, to_ns);
    cursor_ns = to_ns;
  }
  std::uint64_t gather_ns = end_ns;
  if (gather_begun_ns != 0) gather_ns = std::clamp(gather_begun_ns, cursor_ns, end_ns);
  add_wait(rest, use, cursor_ns, gather_ns);
  add_wait(rest.with(TraceReason::kCollective), use, gather_ns, end_ns);
}

std::vector<UnitTime> StepTimeline::unit_times() const {
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
