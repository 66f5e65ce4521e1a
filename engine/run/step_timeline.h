// Where the time of a step went: computation, as measured on its stream, and every wait, with what
// it was for. The step loop says when computation arrives at a unit and resumes with it, and what
// the unit lacks meanwhile; when the step ends, the two are laid over each other.
//
// While a trace is written, what has ended is recorded as it ends, and what lasts is announced, so
// that the trace of a run that is killed says what its last step did.
//
// Thread rule: waits_for() and ready() on the scheduler's thread, while the application's thread
// waits for them; all else on the application's thread. The trace's drainer looks in between.
// Invariant: the parts of StepTimes sum to its total.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include <sluice/device.h>
#include <sluice/step_report.h>
#include "base/trace/trace_ranges.h"
#include "engine/bound/step_cost.h"
#include "engine/plan/layout.h"
#include "engine/plan/schedule.h"
#include "engine/run/work_meter.h"

namespace sluice {

// When an operation among ranks began on its stream; 0 = it has not. Read behind an event that
// follows the operation.
using BeginTime = std::atomic<std::uint64_t>;

// What somebody waits for now.
struct WaitCause {
  TraceReason reason = TraceReason::kNone;
  std::uint32_t unit = kTraceNone;
  std::uint32_t block = kTraceNone;

  WaitCause with(TraceReason other) const { return {other, unit, block}; }
  bool operator==(const WaitCause&) const = default;
};

class StepTimeline {
 public:
  // `layout` and `device` must outlive the timeline.
  StepTimeline(const Layout& layout, Device& device) : layout_(layout), device_(device) {}

  // `schedule` must outlive the step. One of an inference leaves no records but of acquire().
  void begin(const Schedule& schedule, std::uint64_t step);

  // From the use that arrives next on, the schedule is this one. What is waited for until it has
  // arrived, and by it, is the change.
  void follow(const Schedule& schedule);

  // Computation on `stream` comes to `use` when it has done what was enqueued before, and resumes
  // when what is enqueued between the two calls is done. `copies`: what it then waits for is copies
  // to the device, and from `gather_begun_ns` on, if that is not null and not 0, other ranks. It is
  // read behind the event, and must outlive the step.
  void arrive(std::uint32_t use, StreamId stream);
  void resume(std::uint32_t use, StreamId stream, bool copies,
              const BeginTime* gather_begun_ns = nullptr);

  // Under the last use's lease, computation waited between two events of its stream for a boundary
  // activation of `unit`, or for room. Both events stay as they are until the step has ended.
  void pause(EventId asked, EventId granted, std::uint32_t unit);

  // From now on `use`, or for kTraceNone the end of the step, waits for `cause`, or for nothing.
  void waits_for(std::uint32_t use, WaitCause cause);
  void ready() { waits_for(kTraceNone, {}); }

  // `last_release` is recorded behind the last computation of the step: what comes after it is its
  // end.
  void ends(EventId last_release);

  // The step has ended and its work is complete; finish() was called at `finish_ns`. Traces it.
  // Requires: ends().
  StepTimes finish(std::uint64_t finish_ns, const WorkTimes& work);

  // The step will have no end.
  void abandon();

  // Mean seconds that computation took in the steps since the first one; empty before there are
  // two.
  std::vector<UnitTime> unit_times() const;

 private:
  struct Use {
    Event arrived;
    Event resumed;
    std::uint64_t arrive_called_ns = 0;
    std::uint64_t resume_called_ns = 0;
    ScheduledUse scheduled;
    bool copies = false;
    const BeginTime* gather_begun_ns = nullptr;
  };
  struct Pause {
    EventId asked{};
    EventId granted{};
    std::uint32_t use = 0;
    std::uint32_t unit = kTraceNone;
  };
  struct Segment {
    std::uint32_t use = kTraceNone;
    WaitCause cause;
    std::uint64_t begin_ns = 0;
    std::uint64_t end_ns = 0;  // 0 = still open
  };
  struct Computed {
    double forward_s = 0, backward_s = 0;
    std::uint64_t forward_uses = 0, backward_uses = 0;
  };
  // What computation is at, as far as it has been laid out.
  enum class Phase : std::uint8_t { kComputing, kStalled, kEnding };

  void close_segment(std::uint64_t now_ns);
  // Lays out what is known to have ended, or with `all` everything.
  void advance(std::uint64_t now_ns, bool all);
  bool advance_once(std::uint64_t now_ns, bool all);
  bool lay_pauses(std::uint64_t now_ns, bool all);
  void poll();
  void announce(std::uint64_t now_ns);

  // Device time of an event, from that of the first one.
  std::int64_t device_ns(EventId event) const;
  void refine_offset(std::uint64_t called_ns, const Event& event);
  std::uint64_t time_of(EventId event, std::uint64_t now_ns) const;
  void add_compute(std::uint32_t use, std::uint64_t begin_ns, std::uint64_t end_ns);
  void add_wait(const WaitCause& cause, std::uint32_t use, std::uint64_t begin_ns,
                std::uint64_t end_ns);
  void add_segments(std::uint32_t use, std::uint64_t end_ns);

  const Layout& layout_;
  Device& device_;

  // Guarded by mutex_: the drainer reads what the two other threads write.
  mutable std::mutex mutex_;
  std::vector<Use> uses_;  // as many as the longest schedule so far
  std::vector<Computed> computed_;
  std::uint64_t steps_computed_ = 0;

  // Of the step under way.
  const Schedule* schedule_ = nullptr;  // application only
  bool is_training_ = false;
  TraceRangeId range_{};  // of the step
  std::uint64_t step_ = 0;
  std::uint64_t begin_ns_ = 0;
  std::uint32_t arrived_ = 0;  // uses for which arrive() was called, and resume()
  std::uint32_t resumed_ = 0;
  std::optional<EventId> last_release_;
  std::uint32_t changed_use_ = kTraceNone;
  std::vector<Segment> segments_;  // in order of time
  std::vector<Pause> pauses_;      // likewise

  // As far as it has been laid out: up to cursor_ns_, in `phase_` of next_use_.
  Phase phase_ = Phase::kComputing;
  std::uint32_t next_use_ = 0;
  std::size_t next_segment_ = 0;
  std::size_t next_pause_ = 0;
  std::uint32_t computed_use_ = kTraceNone;  // the last one that computation was added of
  std::uint64_t cursor_ns_ = 0;
  std::int64_t offset_ns_ = 0;  // from device_ns() to the steady clock
  std::uint64_t announced_ns_ = 0;
  StepTimes times_;

  TracePoll poll_{[this] { poll(); }};  // last: it calls as soon as it is there
};

}  // namespace sluice
