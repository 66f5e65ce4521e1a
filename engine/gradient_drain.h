// Takes each unit's gradient from the device to the gradient set in host memory: copied when it is
// the unit's first of the step, added when micro-batches or repeated uses follow (one fp32 addition
// and one rounding an element). When the last one has been added, the unit's squared norm is taken.
// Which one is the last, the schedule says, or close(): units that have had no gradient by then
// have one of zeros. Owns the device's gradient slots.
//
// Thread rule: scheduler's thread only.
// Progress: a slot is freed by its copies; those wait for the computation under its released lease,
// and, when adding, for a staging slot, which is freed by the worker. Nothing here waits for the
// prefetcher or for a later use.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/norm_accumulator.h"
#include "engine/layout.h"
#include "engine/placement.h"
#include "engine/schedule.h"
#include "engine/tiers.h"
#include "engine/worker.h"

namespace sluice {

class GradientDrain {
 public:
  // All must outlive the drain. `on_final` runs when a unit's final gradient is in the set and in
  // the norm.
  GradientDrain(const Layout& layout, const Placement& placement, const Tiers& tiers,
                Device& device, Scheduler& scheduler, Worker& worker,
                std::function<void(UnitId)> on_final);

  // Starts a step, the number of which goes into traces: forgets the norm of the one before.
  // Requires: idle().
  void begin(std::uint64_t step);

  // A free gradient slot, taken, if there is one.
  std::optional<std::uint32_t> try_take_slot();
  // Gives a slot back unused.
  void return_slot(std::uint32_t slot) { slot_is_free_[slot] = true; }

  // The lease of `use` is released; `computed` is recorded behind the computation that filled
  // `slot`. A unit whose gradient was final gets another one where the schedule has changed: then
  // it is not final any more.
  void release(const ScheduledUse& use, std::uint32_t slot, EventId computed);
  // No more gradients will come: those that are there are final.
  void close();

  // The schedule has called a gradient of the unit its last of the step.
  bool is_closed(UnitId unit) const { return units_[index_of(unit)].is_closed; }
  // A gradient that had been final has changed since.
  bool was_reopened() const { return was_reopened_; }
  // Units without a gradient in the step. Requires: close() has been called.
  std::uint32_t units_without_gradient() const { return units_without_gradient_; }

  // Every unit's final gradient is in the set and in the norm.
  bool is_complete() const { return final_units_ == trained_units_; }
  bool idle() const { return jobs_.empty() && norms_in_flight_ == 0; }
  // Of all units. Requires: is_complete().
  NormAccumulator norm() const;
  // Where the set holds a gradient that is not finite, for a message. Any thread, while idle().
  std::string describe_non_finite() const;

 private:
  // One unit's gradient on its way to the set.
  struct Job {
    ScheduledUse use;
    bool is_first = false;  // of its unit in the step
    std::uint32_t slot = 0;
    std::uint32_t next_piece = 0;      // piece = block of the unit; only when adding
    std::uint32_t copies_left = 0;     // until the slot is free
    std::uint32_t additions_left = 0;  // until the set holds the sum
  };

  struct StagingSlot {
    std::uint32_t block = 0;
    bool is_free = true;
  };

  struct Unit {
    std::uint32_t jobs = 0;   // released and not yet in the set
    std::uint32_t norms = 0;  // being taken; the last one counts
    bool has_gradient = false;
    bool is_closed = false;
    bool is_whole = false;  // but for its norm
    bool is_final = false;
  };

  void pump();
  void start_copy(Job& job);
  bool start_piece(Job& job);
  void piece_copied(std::uint32_t staging_slot);
  void piece_added(std::uint32_t staging_slot);
  void copy_done();
  void finish_front();
  void close_units();
  void start_norm(UnitId unit);
  void norm_taken(UnitId unit);
  void add_piece(std::uint32_t staging_slot);
  void take_norm(UnitId unit);

  const Layout& layout_;
  const Placement& placement_;
  const Tiers& tiers_;
  Device& device_;
  Scheduler& scheduler_;
  Worker& worker_;
  std::function<void(UnitId)> on_final_;

  std::uint64_t step_ = 0;
  std::vector<bool> slot_is_free_;
  std::vector<StagingSlot> staging_;
  std::deque<Job> jobs_;  // in order of release; only the front one moves
  bool front_is_started_ = false;
  std::vector<Unit> units_;
  std::uint32_t norms_in_flight_ = 0;
  std::uint32_t trained_units_ = 0;  // constant; those that are not frozen
  std::uint32_t final_units_ = 0;
  std::uint32_t units_without_gradient_ = 0;
  bool is_closing_ = false;
  bool was_reopened_ = false;
  std::vector<NormAccumulator>
      unit_norms_;  // by unit; written by the worker between post and completion

  Stream copy_stream_;  // last: its callbacks use all of the above
};

}  // namespace sluice
