// The drain moves each unit's gradients from the device's gradient slots to the gradients' home.
// The home is host memory, device memory or storage (engine/flow/gradient_home.h). The drain copies
// a unit's first gradient of the step. Later gradients of the unit come from further micro-batches
// and from repeated uses. The later gradients are added to the copy, with one fp32 addition and one
// rounding per element. After the last addition, the squared norm of the sum is computed. Gradients
// move to their home one at a time, in the order in which the gradients' leases are released. The
// schedule says which gradient of a unit is the last one. After the call of close(), no more
// gradients come. Units without a gradient then get a gradient of zeros. The drain owns the
// device's gradient slots.
//
// If there are several ranks, the ranks add up their gradients in the slot on the device. The order
// of the additions is the order of the backward uses. The ranks add up either the gradient of each
// use or the unit's complete sum over the step. If the ranks add up the gradient of each use, the
// addition comes before the gradient's move to its home. If the ranks add up the complete sum, this
// sum is first copied from its home back to the slot.
//
// Thread rule: scheduler's thread only.
// Progress: a gradient slot becomes free when the copies from the slot have ended. The copies wait
// until the computation that fills the slot has ended. The lease of this computation has been
// released. If the gradient is added to a sum, the copies also wait for a staging slot, which the
// worker frees. The drain never waits for the prefetcher or for a later use.
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
#include "engine/flow/gradient_zeros.h"
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
  // The function `on_final` runs when a unit's final gradient has reached its home and is part of
  // the norm. `on_final` does not run for a gradient that is not finite. An update that does not
  // wait for the norm must not use a gradient that is not finite.
  GradientDrain(const FlowParts& parts, const ResidentUnits& residents, WaitingGradients& waiting,
                DeviceMath* math, std::function<void(UnitId)> on_final);

  // Starts a step and forgets the norm of the previous step. The number `step` appears in the
  // trace. If `reduces_each` is true, the ranks add up the gradient of every use. Otherwise the
  // ranks add up each unit's gradient only once, when this rank's sum over the step is complete. If
  // the ranks add up only the complete sum, the home of a gradient needs room for the whole unit.
  // For announced units, the ranks always add up the gradient of every use, because the schedule
  // does not say which gradient is the last. Requires: idle().
  void begin(std::uint64_t step, bool reduces_each);

  // Takes the gradient slot that has been free for the longest time. The result is empty if no slot
  // is free. Slots are taken in the order of the schedule, and become free in the order in which
  // leases are released. So the slot of a use does not depend on timing, and is the same on every
  // rank. If slots are registered with NCCL, a reduction requires the same slot on all ranks. Local
  // units exist only on this rank. Therefore, local units have separate slots. The slot is prepared
  // (engine/flow/gradient_zeros.h) after the slot's zeroed_event() has occurred.
  std::optional<std::uint32_t> try_take_slot(UnitId unit);
  EventId zeroed_event(std::uint32_t slot) const { return zeros_.slot_event(slot); }

  // Lends a place for the unit's first gradient of the step. This place is the unit's own place in
  // the gradient set. Returns false if the place cannot be lent. The lent place is prepared when
  // the event set_zeroed_event() has occurred. The next call of try_lend_set() records
  // set_zeroed_event() again.
  // Requires: the unit has been updated, so no update reads this place any more.
  bool try_lend_set(UnitId unit);
  EventId set_zeroed_event() const { return zeros_.set_event(); }

  // Called when the lease of `use` has been released. `computed` is recorded after the computation
  // of the gradient. The computation fills `slot`. If there is no slot, the computation fills the
  // unit's place in the gradient set. If the schedule has changed, a unit with a final gradient may
  // get another gradient. In this case, the earlier gradient is no longer final.
  void release(const ScheduledUse& use, std::optional<std::uint32_t> slot, EventId computed);
  // Called when no more gradients will come. The present gradients are then final. Units without a
  // gradient get a gradient of zeros, unless optimizer.untouched leaves these units unchanged.
  // Later calls of close() do nothing. Requires: no update reads the gradients of the step any
  // more.
  void close();

  // Whether the unit has got its last gradient of the step. The schedule says which gradient is the
  // last one.
  bool is_closed(UnitId unit) const { return units_[index_of(unit)].is_closed; }
  // The bytes that have been copied out of gradient slots since the last call.
  std::uint64_t take_copied_bytes() { return std::exchange(copied_bytes_, 0); }
  // The bytes of host memory that have been filled with zeros since the last call.
  std::uint64_t take_zero_bytes() {
    return zeros_.take_filled_bytes() + std::exchange(zero_bytes_, 0);
  }
  // Whether a unit has got another gradient after the unit's gradient had become final.
  bool was_reopened() const { return was_reopened_; }
  // The number of units that have got no gradient in the step. Announced units are left out. Units
  // that the update leaves unchanged (optimizer.untouched) do not count in the norm. Requires:
  // close() has been called.
  std::uint32_t units_without_gradient() const { return units_without_gradient_; }

  // Whether the final gradients of all units have reached their home and are part of the norm.
  bool is_complete() const { return final_units_ == trained_units_; }
  bool idle() const { return jobs_.empty() && norms_in_flight_ == 0; }
  // The reason why is_complete() is false, or why no gradient slot is free.
  WaitCause waits_for() const;
  // The norm of all gradients that this rank owns. Requires: is_complete().
  NormAccumulator norm() const;
  // Requests the norms of the present gradients. The computation of the norms starts when all of
  // these gradients have reached their home. The norms of final gradients are already known.
  // Requires: after this call, release() is not called until is_measured() is true.
  void measure();
  bool is_measured() const { return !is_measuring_ && idle(); }
  // The norm of the present gradients, without the parts that other ranks own. Requires:
  // is_measured().
  NormAccumulator norm_so_far() const;
  // Does the same as norm_so_far(), but counts only the local units. Requires: is_measured() or
  // is_complete().
  NormAccumulator local_norm() const;
  // Returns a text for messages. The text says where a gradient has an element that is not finite.
  // Any thread may call this function while idle() is true.
  std::string describe_non_finite() const;

 private:
  // A Job moves one unit's gradient to the gradient's home.
  struct Job {
    ScheduledUse use;
    bool is_first = false;  // the first gradient of the unit in the step
    std::uint32_t slot = 0;
    std::uint64_t released_ns = 0;
    TraceRangeId range{};
    std::uint64_t computed_ns = 0;  // 0 = computation has not filled the slot yet
    bool has_slot = true;           // otherwise the gradient is in the gradient set, or zero
    bool is_in_set = false;         // the gradient has been computed in the gradient set
    bool has_left = false;          // the gradient has been copied out of the slot
    bool is_home = false;
    bool is_reduced = false;        // the ranks have added up this gradient
    std::uint64_t moved_bytes = 0;  // of the gradient, to where it waits
  };

  struct Unit {
    std::uint32_t jobs = 0;   // gradients that have been released, but are not at home yet
    std::uint32_t norms = 0;  // norms that are wanted or being computed; the last one counts
    bool has_gradient = false;
    bool has_lent_set = false;
    bool is_closed = false;
    bool is_whole = false;  // the complete sum is at home; the norm may be missing
    bool is_final = false;
  };

  GradientHome::Callbacks callbacks();
  GradientHome& home_of(UnitId unit) const { return *homes_[index_of(unit)]; }
  bool stays(UnitId unit) const {
    return !units_[index_of(unit)].has_gradient && placement_.may_stay(layout_.unit(unit));
  }
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
  GradientZeros zeros_;
  std::vector<GradientHome*> homes_;  // by unit; constant after construction

  std::uint64_t step_ = 0;
  bool reduces_each_ = true;
  std::vector<std::uint32_t> free_slots_;  // in the order in which they became free
  std::vector<std::uint32_t> free_local_slots_;
  std::uint64_t copied_bytes_ = 0;
  std::uint64_t zero_bytes_ = 0;  // of units without a gradient
  std::deque<Job> jobs_;          // in order of release; only the first one moves
  bool front_is_started_ = false;
  bool is_reducing_ = false;     // the ranks are adding up the first of jobs_
  std::uint64_t copied_ns_ = 0;  // when the last copy ended
  std::vector<Unit> units_;
  std::uint32_t norms_in_flight_ = 0;
  std::uint32_t trained_units_ = 0;  // number of units that are not frozen; constant
  std::uint32_t final_units_ = 0;
  std::uint32_t units_without_gradient_ = 0;
  bool is_closing_ = false;
  bool is_measuring_ = false;
  bool is_over_ = false;  // close() has been called
  bool was_reopened_ = false;

  Stream copy_stream_;  // last member, because its callbacks use all others
};

}  // namespace sluice
