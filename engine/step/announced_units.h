// The uses of announced units in a step. The object knows the order of these uses, and how many of
// them have been acquired. The fetches for announced uses have a plan of their own. The fetches for
// the uses in the schedule have a different plan. With several ranks, local units
// (UnitSpec::is_local) have an order, a plan and places of their own. The reason is that ranks use
// local units at different times, but must gather all other units at the same times.
//
// Thread rule: the application's thread calls check(), next(), has_come() and are_shared_over().
// The application's thread also calls add(), but only while the scheduler's thread waits. The
// scheduler's thread calls everything else.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "engine/flow/flow_parts.h"
#include "engine/flow/prefetcher.h"
#include "engine/plan/announced_uses.h"

namespace sluice {

class AnnouncedUnits {
 public:
  // All arguments must outlive the object. `on_change` is called when a fetch has made progress.
  AnnouncedUnits(const FlowParts& parts, ParameterSlots& slots, const ResidentUnits& residents,
                 std::function<void()> on_change);

  // Starts a step. `version` is the version of the parameters. Requires: idle().
  void begin(std::uint64_t version);
  // Requires: check_announcement(units) has passed.
  void add(std::span<const UnitId> units, Pass pass);

  // Fails with kInvalidArgument if a unit does not exist, is not an announced unit, or is given
  // twice. Also fails with kInvalidArgument if `units` mixes units of this rank alone with other
  // units.
  void check_announcement(std::span<const UnitId> units) const;
  // Returns whether this rank alone uses the unit. Requires: the unit is announced.
  bool is_own(UnitId unit) const;
  // The announced units that ranks use together are numbered in the order of the model. number_of()
  // returns the number of a unit. all() returns the units in the order of their numbers.
  std::uint32_t number_of(UnitId unit) const { return numbers_[index_of(unit)]; }
  std::span<const UnitId> all() const { return all_; }
  // Checks that the next announced use has the unit `unit` and the pass `pass`.
  // Fails with kInvalidArgument if the next use has another unit or another pass.
  void check_next(UnitId unit, Pass pass) const;
  // next() returns the next use of a unit of the same kind as `unit`. come() returns how many uses
  // of units of this kind have been acquired.
  const ScheduledUse& next(UnitId unit) const { return line_of(unit).next(); }
  std::uint32_t come(UnitId unit) const { return line_of(unit).come; }
  void has_come(UnitId unit) { ++line_of(unit).come; }
  std::uint32_t shared_come() const { return shared_.come; }
  bool are_shared_over() const { return shared_.is_over(); }
  // Returns the number of uses of all kinds of units.
  std::uint32_t count() const { return shared_.count() + (local_ ? local_->count() : 0); }
  // Fails with kInvalidArgument if an announced use has not been acquired.
  void require_over() const;
  std::uint64_t read_bytes() const;
  std::uint64_t update_bytes() const;

  Prefetcher& fetches_of(UnitId unit) { return line_of(unit).fetches; }
  Prefetcher& shared_fetches() { return shared_.fetches; }
  // The functions below apply to the fetches of all kinds of units.
  void pump();
  void stop();
  bool idle() const;
  void take_moved(StepReport& report);

 private:
  // A Line has a sequence of uses, and a prefetcher for these uses.
  struct Line {
    AnnouncedUses uses;
    Prefetcher fetches;
    std::uint32_t come = 0;

    const ScheduledUse& next() const { return uses.schedule()[come]; }
    std::uint32_t count() const { return static_cast<std::uint32_t>(uses.schedule().size()); }
    bool is_over() const { return come == count(); }
  };

  const Line& line_of(UnitId unit) const { return is_own(unit) ? *local_ : shared_; }
  Line& line_of(UnitId unit) { return is_own(unit) ? *local_ : shared_; }

  const Layout& layout_;
  std::vector<UnitId> all_;
  std::vector<std::uint32_t> numbers_;  // by unit; meaningless for units that are not in all_
  Line shared_;
  std::unique_ptr<Line> local_;  // null with one rank, or without local units
};

}  // namespace sluice
