// The uses of announced units in a step. The object knows the order of these uses, and which uses
// have come. The fetches for these uses follow a plan of their own, beside the fetches of the
// schedule.
//
// Thread rule: the application's thread calls check(), next(), has_come() and is_over(). The
// application's thread also calls add(), but only while the scheduler's thread waits. The
// scheduler's thread calls everything else.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "engine/flow/flow_parts.h"
#include "engine/flow/prefetcher.h"
#include "engine/plan/announced_uses.h"

namespace sluice {

class AnnouncedUnits {
 public:
  // All arguments must outlive the object. `on_change` is called when something has moved.
  AnnouncedUnits(const FlowParts& parts, ParameterSlots& slots, const ResidentUnits& residents,
                 std::function<void()> on_change);

  // Starts a step, with the parameters at `version`. Requires: fetches() are idle.
  void begin(std::uint64_t version);
  void add(std::span<const UnitId> units, Pass pass);

  // Fails with kInvalidArgument if a unit does not exist, is not an announced unit, or is given
  // twice.
  void check_announcement(std::span<const UnitId> units) const;
  // The announced units are numbered in the order of the model. The call number_of() gives a unit's
  // number, and all() has the units by number.
  std::uint32_t number_of(UnitId unit) const { return numbers_[index_of(unit)]; }
  std::span<const UnitId> all() const { return all_; }
  // Whether `unit` in `pass` is the next use.
  // Fails with kInvalidArgument if another use is next.
  void check_next(UnitId unit, Pass pass) const;
  const ScheduledUse& next() const { return uses_.schedule()[come_]; }
  void has_come() { ++come_; }
  std::uint32_t come() const { return come_; }
  std::uint32_t count() const { return static_cast<std::uint32_t>(uses_.schedule().size()); }
  bool is_over() const { return come_ == count(); }
  // Fails with kInvalidArgument if a use is still to come.
  void require_over() const;
  std::uint64_t read_bytes() const { return uses_.read_bytes(); }
  std::uint64_t update_bytes() const { return uses_.update_bytes(); }

  Prefetcher& fetches() { return fetches_; }
  const Prefetcher& fetches() const { return fetches_; }

 private:
  const Layout& layout_;
  std::vector<UnitId> all_;
  std::vector<std::uint32_t> numbers_;  // by unit; of others, without meaning
  AnnouncedUses uses_;
  Prefetcher fetches_;
  std::uint32_t come_ = 0;
};

}  // namespace sluice
