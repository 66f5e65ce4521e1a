// Takes each unit's gradients from the device's slots to their home: host memory, device memory or
// storage (engine/flow/gradient_home.h). The unit's first gradient of the step is copied. Gradients
// of further micro-batches or repeated uses are added (one fp32 addition and one rounding per
// element). After the last addition, the unit's squared norm is taken. Gradients come home one at a
// time, in order of release.
// The schedule, or close(), says which gradient is the last. At close(), units without a gradient
// get a gradient of zeros. The drain owns the device's gradient slots.
//
// Several ranks add up their gradients in the slot, on the device, in the order of the backward
// uses. The ranks add each use's gradient before the gradient goes home, or they add the unit's
// complete sum over the step. For a complete sum, the sum is first copied back to the slot.
//
// Thread rule: scheduler's thread only.
// Progress: a slot is freed by its copies. The copies wait for the computation under the slot's
// released lease. The copies of a gradient that will be added also wait for a staging slot, which
// the worker frees. The drain never waits for the prefetcher or for a later use.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/norm_accumulator.h"
#include "base/trace/trace_ranges.h"
#include "engine/flow/device_gradients.h"
#include "engine/flow/flow_parts.h"
#include "engine/flow/gradient_home.h"
#include "engine/flow/gradient_spill.h"
#include "engine/flow/host_gradients.h"
#include "engine/flow/resident_units.h"
#include "engine/plan/schedule.h"
#include "engine/ranks/ranks.h"
#include "engine/run/step_timeline.h"
#include "engine/store/tiers.h"
#include "gpu/math/device_math.h"

namespace sluice {

class GradientDrain {
 public:
  // All arguments must outlive the drain. `math` may be null if no gradient waits on the device.
  // `on_final` runs when a unit's final gradient is at home and in the norm. `on_final` does not
  // run for a gradient that is not finite. An update that does not wait for the norm must not use
  // such a gradient.
  GradientDrain(const FlowParts& parts, const ResidentUnits& residents, WaitingGradients& waiting,
                DeviceMath* math, std::function<void(UnitId)> on_final);

  // Starts a step, whose number goes into traces, and forgets the norm of the previous step. With
  // `reduces_each`, every use's gradient is added over the ranks. Otherwise the ranks add only the
  // sum of each unit, and the home must hold the whole sum. Gradients of announced units are always
  // added over the ranks at every use, because nothing says which gradient of such a unit is the
  // last.
  // Requires: idle().
  void begin(std::uint64_t step, bool reduces_each);

  // Takes the gradient slot that has been free for longest, if there is a free slot. The uses take
  // slots in the order of the schedule, and slots become free in the order of release. So a use's
  // slot does not depend on timing and is the same on every rank. Reductions in memory registered
  // with NCCL require this, so units of this rank alone have slots of their own. The slot's bytes
  // are zero after zeroed_event().
  std::optional<std::uint32_t> try_take_slot(UnitId unit);
  EventId zeroed_event(std::uint32_t slot) const { return zeroed_events_[slot].id(); }

  // Lends the unit's own place in the set for the unit's first gradient of the step, if possible.
  // The place's bytes are zero after set_zeroed_event(), until the next call.
  // Requires: the unit has been updated, so no update reads the set's place any more.
  bool try_lend_set(UnitId unit);
  EventId set_zeroed_event() const { return set_zeroed_event_.id(); }

  // Called when the lease of `use` has been released. `computed` is recorded after the computation
  // that filled `slot` or, without a slot, the set's place. If the schedule has changed, a unit
  // with a final gradient may get another gradient. The earlier gradient is then no longer final.
  void release(const ScheduledUse& use, std::optional<std::uint32_t> slot, EventId computed);
  // Called when no more gradients will come, so that the present ones are final. Units without a
  // gradient get zeros, unless they stay as they are. Later calls do nothing. Requires: no update
  // reads the gradients any more.
  void close();

  // Whether the schedule has marked a gradient of the unit as its last of the step.
  bool is_closed(UnitId unit) const { return units_[index_of(unit)].is_closed; }
  // The bytes copied out of slots since the last call.
  std::uint64_t take_copied_bytes() { return std::exchange(copied_bytes_, 0); }
  // Whether a gradient has changed after it was final.
  bool was_reopened() const { return was_reopened_; }
  // Units without a gradient in the step, except announced ones. If such units stay as they are
  // (optimizer.untouched), the units have no part in the norm. Requires: close() has been called.
  std::uint32_t units_without_gradient() const { return units_without_gradient_; }

  // Whether every unit's final gradient is at home and in the norm.
  bool is_complete() const { return final_units_ == trained_units_; }
  bool idle() const { return jobs_.empty() && norms_in_flight_ == 0; }
  // The reason why is_complete() is still false, or why no gradient slot is free.
  WaitCause waits_for() const;
  // The norm of everything that this rank owns. Requires: is_complete().
  NormAccumulator norm() const;
  // Takes the norms of the gradients that have come, as soon as all of them are at home. Gradients
  // that are final have theirs already. Requires: no gradient comes before is_measured().
  void measure();
  bool is_measured() const { return !is_measuring_ && idle(); }
  // The norm of the gradients that have come, as far as this rank owns them. Requires:
  // is_measured().
  NormAccumulator norm_so_far() const;
  // norm_so_far() of the local units alone. Requires: is_measured() or is_complete().
  NormAccumulator local_norm() const;
  // The place of a gradient that is not finite, for a message. Any thread, while idle().
  std::string describe_non_finite() const;

 private:
  // One unit's gradient on its way home.
  struct Job {
    ScheduledUse use;
    bool is_first = false;  // the unit's first in the step
    std::uint32_t slot = 0;
    std::uint64_t released_ns = 0;
    TraceRangeId range{};
    std::uint64_t computed_ns = 0;  // 0 = computation has not filled the slot yet
    bool has_slot = true;           // otherwise it is in the set, or zero
    bool is_in_set = false;         // has been computed there
    bool has_left = false;          // out of the slot
    bool is_home = false;
    bool is_reduced = false;  // has been added over the ranks
  };

  struct Unit {
    std::uint32_t jobs = 0;   // released but not yet home
    std::uint32_t norms = 0;  // wanted or under way, one at a time; the last one counts
    bool has_gradient = false;
    bool has_lent_set = false;
    bool is_closed = false;
    bool is_whole = false;  // except for its norm
    bool is_final = false;
  };

  GradientHome::Callbacks callbacks();
  GradientHome& home_of(UnitId unit) const { return *homes_[index_of(unit)]; }
  bool stays(UnitId unit) const {
    return !units_[index_of(unit)].has_gradient && placement_.may_stay(layout_.unit(unit));
  }
  void zero(std::uint32_t slot, std::uint64_t size_bytes);
  void pump();
  void move_home(Job& job);
  void note_computed();
  void left();
  void arrived();
  void move_front();
  void close_units();
  void measure_units();
  void add_waiting(UnitId unit);
  bool reduces_each(UnitId unit) const;
  // Whether the ranks add up the unit's gradient.
  bool is_reduced(UnitId unit) const {
    return ranks_.are_several() && !layout_.unit(unit).is_local;
  }
  std::vector<std::uint32_t>& free_slots_of(UnitId unit) {
    const bool is_own = placement_.local_gradient_slots != 0 && layout_.unit(unit).is_local;
    return is_own ? free_local_slots_ : free_slots_;
  }
  void reduce(Job& job, bool is_last);
  bool awaits_reduction(const Job& job) const;
  void start_last_reduction(Job& job);
  void start_norm(UnitId unit);
  void take_norm(UnitId unit);
  void norm_taken(UnitId unit);
  TraceKind kind_of(UnitId unit) const;
  void trace_copy(Job& job);

  const Layout& layout_;
  const Placement& placement_;
  const Tiers& tiers_;
  Device& device_;
  Scheduler& scheduler_;
  Ranks& ranks_;
  WaitingGradients& waiting_;
  std::function<void(UnitId)> on_final_;
  HostGradients host_;
  DeviceGradients on_device_;
  GradientSpill spill_;
  std::vector<GradientHome*> homes_;  // by unit; constant after construction

  std::uint64_t step_ = 0;
  bool reduces_each_ = true;
  std::vector<std::uint32_t> free_slots_;  // a few; in the order in which they became free
  std::vector<std::uint32_t> free_local_slots_;
  std::vector<Event> zeroed_events_;  // by slot
  Event set_zeroed_event_;
  std::uint64_t copied_bytes_ = 0;
  std::deque<Job> jobs_;  // in order of release; only the front one moves
  bool front_is_started_ = false;
  bool is_reducing_ = false;     // the front one, over the ranks
  std::uint64_t copied_ns_ = 0;  // when the last copy ended
  std::vector<Unit> units_;
  std::uint32_t norms_in_flight_ = 0;
  std::uint32_t trained_units_ = 0;  // constant; without frozen ones
  std::uint32_t final_units_ = 0;
  std::uint32_t units_without_gradient_ = 0;
  bool is_closing_ = false;
  bool is_measuring_ = false;
  bool is_over_ = false;  // close() has been called
  bool was_reopened_ = false;

  Stream zero_stream_;
  Stream copy_stream_;  // last: its callbacks use everything above
};

}  // namespace sluice
