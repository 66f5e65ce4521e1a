// The timeline records how the time of a step was spent. The time consists of computation and of
// waits. Events on the device's stream measure the time of computation. Each wait has a reason. The
// step loop reports when computation arrives at a unit, and when computation resumes with the unit.
// For the time between the two reports, the step loop reports why the unit is not ready. When the
// step ends, the timeline combines these reports.
//
// While a trace is written, each span is recorded when the span ends. Spans that are still running
// are announced. So even the trace of a killed run shows the work of the run's last step.
//
// Thread rule: the scheduler's thread calls waits_for() and ready(), while the application's thread
// waits for these calls. The application's thread calls everything else. Between these calls, the
// trace's drainer polls the timeline.
// Invariant: the parts of StepTimes add up to the total time.
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

// The part of a step's time to which a wait belongs.
enum class Blame : std::uint8_t { kIo, kOptimizer, kOther };
Blame blame_of(TraceReason reason);

// The time when an operation among ranks began on its stream. If the operation has not begun yet,
// the time is 0. The time must be read after an event that follows the operation.
using BeginTime = std::atomic<std::uint64_t>;

// TraceRecord::detail of a wait after the step's end, for the rest of the step's update.
inline constexpr std::uint8_t kTraceAfterStep = 1;

// The present cause of a wait.
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

  // Called when a step begins. The schedule gives the kind of the step, and the approximate number
  // of uses. For an inference, only the calls of acquire() are recorded.
  void begin(const Schedule& schedule, std::uint64_t step);

  // Called when the schedule has changed. If the next use has to wait, the change counts as the
  // cause.
  void change();
  // This function is called when `uses` further uses are added to the step.
  void lengthen(std::size_t uses);

  // Computation reaches the use with the number `use` when `stream` has done the work that was
  // enqueued before arrive(). Computation resumes when the work that was enqueued between arrive()
  // and resume() is done. If `copies` is set, the wait between these two points is a wait for
  // copies to the device. If `gather_begun_ns` points to a time other than 0, computation waits for
  // other ranks from that time on. The timeline reads the time in `gather_begun_ns` when the use
  // has resumed. The object with the time must outlive the step.
  void arrive(std::uint32_t use, StreamId stream);
  struct Resumption {
    ScheduledUse scheduled;
    bool copies = false;
    const BeginTime* gather_begun_ns = nullptr;
  };
  void resume(std::uint32_t use, StreamId stream, const Resumption& how);

  // The call records that computation waited for `cause` between the two events. An example of
  // `cause` is a boundary activation. Both events are recorded after computation has resumed with
  // the last use. Neither event may be recorded again until the step has ended.
  void pause(EventId asked, EventId granted, const WaitCause& cause);

  // From now on, the use with the number `use` waits for `cause`. If the reason of `cause` is
  // kNone, the use no longer waits. The number kTraceNone stands for the end of the step.
  void waits_for(std::uint32_t use, WaitCause cause);
  void ready() { waits_for(kTraceNone, {}); }

  // `last_release` is recorded after the last computation of the step. The time after this event
  // belongs to the step's end.
  void ends(EventId last_release);

  // Called when the step and all its work have ended. `finish_ns` is the time at which the
  // application called finish(). The call records the step in the trace.
  // Requires: ends().
  StepTimes finish(std::uint64_t finish_ns, const WorkTimes& work);

  // Called when the step ends without a call of finish().
  void abandon();

  // Between steps, the application waits for the end of the last update from drain_begins() to
  // drained(). The trace gets these waits, under the number of the step whose update it is.
  void drain_begins();
  void drained();

  // Returns the mean time, in seconds, that computation takes for one use of each unit. The first
  // step is left out. The result is empty before the second step has ended.
  std::vector<UnitTime> unit_times() const;

 private:
  struct Use {
    Event arrived;
    Event resumed;
    std::uint64_t arrive_called_ns = 0;
    std::uint64_t resume_called_ns = 0;
    Resumption how;
  };
  struct Pause {
    EventId asked{};
    EventId granted{};
    std::uint32_t use = 0;
    WaitCause cause;
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
  // The state of computation at the time cursor_ns_.
  enum class Phase : std::uint8_t { kComputing, kStalled, kEnding };

  void close_segment(std::uint64_t now_ns);
  std::size_t segments_left(std::uint32_t use) const;
  // Divides the step into parts, up to the last part that is known to have ended. If `all` is set,
  // the function divides the whole step.
  void advance(std::uint64_t now_ns, bool all);
  bool advance_once(std::uint64_t now_ns, bool all);
  bool lay_pauses(std::uint64_t now_ns, bool all);
  void poll();
  void announce(std::uint64_t now_ns);

  // Returns the time of `event` on the device's clock. The time is counted from the first event of
  // the step.
  std::int64_t device_ns(EventId event) const;
  void refine_offset(std::uint64_t called_ns, const Event& event);
  std::uint64_t time_of(EventId event, std::uint64_t now_ns) const;
  void add_compute(std::uint32_t use, std::uint64_t begin_ns, std::uint64_t end_ns);
  void add_wait(const WaitCause& cause, std::uint32_t use, std::uint64_t begin_ns,
                std::uint64_t end_ns);
  void add_segments(std::uint32_t use, std::uint64_t end_ns);

  const Layout& layout_;
  Device& device_;

  // Guarded by mutex_. The drainer reads these members, and the two other threads write these
  // members.
  mutable std::mutex mutex_;
  std::vector<Use> uses_;  // as many as the longest schedule so far
  std::vector<Computed> computed_;
  std::uint64_t steps_computed_ = 0;

  // The step under way:
  bool is_training_ = false;
  TraceRangeId range_{};  // of the step
  std::uint64_t step_ = 0;
  std::uint64_t begin_ns_ = 0;
  std::uint32_t arrived_ = 0;  // number of uses that have arrived
  std::uint32_t resumed_ = 0;  // number of uses that have resumed
  std::optional<EventId> last_release_;
  std::uint32_t changed_use_ = kTraceNone;
  std::size_t expected_uses_ = 0;  // by the schedule and lengthen()
  std::vector<Segment> segments_;  // in order of time
  std::vector<Pause> pauses_;      // likewise

  // The step has been divided into parts up to the time cursor_ns_. phase_ is the state of
  // computation at this time. next_use_ is the first use that has not resumed by this time.
  Phase phase_ = Phase::kComputing;
  std::uint32_t next_use_ = 0;
  std::size_t next_segment_ = 0;
  std::size_t next_pause_ = 0;
  std::uint32_t computed_use_ = kTraceNone;  // the last use whose computation was added
  std::uint64_t cursor_ns_ = 0;
  std::int64_t offset_ns_ = 0;  // from device_ns() to the steady clock
  std::uint64_t announced_ns_ = 0;
  StepTimes times_;

  TracePoll poll_{[this] { poll(); }};  // last, because calls begin as soon as it exists
};

}  // namespace sluice
