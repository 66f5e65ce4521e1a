// Where the time of a step went: computation, as measured on its stream, and every wait, with what
// it was for. The step loop says when computation arrives at a unit and resumes with it, and what
// the unit lacks meanwhile; when the step ends, the two are laid over each other.
//
// Thread rule: waits_for() and ready() on the scheduler's thread, while the application's thread
// waits for them; all else on the application's thread.
// Invariant: the parts of StepTimes sum to its total.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "base/trace.h"
#include "engine/layout.h"
#include "engine/schedule.h"
#include "engine/step_cost.h"
#include "engine/work_meter.h"
#include "gpu/device.h"

namespace sluice {

// What somebody waits for now.
struct WaitCause {
  TraceReason reason = TraceReason::kNone;
  std::uint32_t unit = kTraceNone;
  std::uint32_t block = kTraceNone;

  WaitCause with(TraceReason other) const { return {other, unit, block}; }
  bool operator==(const WaitCause&) const = default;
};

// Of one step, from begin_step() to finish()'s return.
struct StepTimes {
  std::int64_t total_ns = 0;
  std::int64_t compute_ns = 0;            // under leases, and between them on their stream
  std::int64_t exposed_io_ns = 0;         // waits for storage, copies and their buffers
  std::int64_t exposed_optimizer_ns = 0;  // waits for the update: its reads and writes, Adam, norms
  std::int64_t other_ns = 0;              // before the first lease; what nobody is to blame for
  std::array<std::int64_t, kTraceReasons> wait_ns{};  // by TraceReason
  // Of the waits, those of computation before a unit; and of these, for updates.
  std::int64_t stall_ns = 0;
  std::int64_t stall_for_update_ns = 0;
  WorkTimes work;  // what was at work beside computation, in this time

  std::int64_t exposed_ns() const { return exposed_io_ns + exposed_optimizer_ns; }
  // Of the time in which storage, copies or the optimizer worked, the share during which nothing
  // waited for them; 1 when they did nothing.
  double hidden_share() const;
};

class StepTimeline {
 public:
  // `layout` and `device` must outlive the timeline.
  StepTimeline(const Layout& layout, Device& device) : layout_(layout), device_(device) {}

  // `schedule` must outlive the step.
  void begin(const Schedule& schedule, std::uint64_t step);

  // From the use that arrives next on, the schedule is this one. What is waited for until it has
  // arrived, and by it, is the change.
  void follow(const Schedule& schedule);

  // Computation on `stream` comes to `use` when it has done what was enqueued before, and resumes
  // when what is enqueued between the two calls is done. `copies`: what it then waits for is copies
  // to the device.
  void arrive(std::uint32_t use, StreamId stream);
  void resume(std::uint32_t use, StreamId stream, bool copies);

  // From now on `use`, or for kTraceNone the end of the step, waits for `cause`, or for nothing.
  void waits_for(std::uint32_t use, WaitCause cause);
  void ready() { waits_for(kTraceNone, {}); }

  // The step has ended and its work is complete; `last_release` is recorded behind the last
  // computation; finish() was called at `finish_ns`; `gather_begun_ns` says when the gather that a
  // use waited for last began, or 0. Traces it.
  StepTimes finish(EventId last_release, std::uint64_t finish_ns, const WorkTimes& work,
                   const std::function<std::uint64_t(std::uint32_t use)>& gather_begun_ns);

  // Mean seconds that computation took in the steps since the first one; empty before there are
  // two.
  std::vector<UnitTime> unit_times() const;

 private:
  struct Use {
    Event arrived;
    Event resumed;
    std::uint64_t arrive_called_ns = 0;
    std::uint64_t resume_called_ns = 0;
    bool copies = false;
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

  // Device time of an event, from that of the first one.
  std::int64_t device_ns(const Event& event) const;
  std::uint64_t host_offset_ns() const;
  void add_compute(std::uint32_t use, std::uint64_t begin_ns, std::uint64_t end_ns);
  void add_wait(const WaitCause& cause, std::uint32_t use, std::uint64_t begin_ns,
                std::uint64_t end_ns);
  void add_stall(std::uint32_t use, std::uint64_t begin_ns, std::uint64_t end_ns,
                 const WaitCause& rest, std::uint64_t gather_begun_ns = 0);

  const Layout& layout_;
  Device& device_;
  std::vector<Use> uses_;  // as many as the longest schedule so far
  std::vector<Computed> computed_;
  std::uint64_t steps_computed_ = 0;

  // Of the step under way.
  const Schedule* schedule_ = nullptr;
  std::uint64_t step_ = 0;
  std::uint64_t begin_ns_ = 0;
  std::uint32_t arrived_ = 0;
  std::uint32_t changed_use_ = kTraceNone;
  std::vector<Segment> segments_;  // in order of time
  std::size_t next_segment_ = 0;
  StepTimes times_;
};

}  // namespace sluice
