// The number of updates that each unit has seen, including an update under way. This number is the
// version of the unit's blocks (engine/store/block_store.h). The optimizer's bias correction uses
// the same number. If every step updates every unit, all numbers are equal. With
// optimizer.untouched = "skip", units may have different numbers.
//
// Thread rule: one thread at a time. In an engine, the scheduler's thread changes the numbers.
// Invariant: the number of a frozen unit is 0.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include <sluice/state_source.h>
#include "engine/plan/layout.h"

namespace sluice {

class UnitVersions {
 public:
  // The constructor sets every unit to 0. `layout` must outlive the object.
  explicit UnitVersions(const Layout& layout)
      : layout_(layout), versions_(layout.units().size(), 0) {}

  // Sets the version of every unit to the unit's version at `position`.
  // Fails with kInput if a tensor has seen more updates than there were steps. The call also fails
  // with kInput if the tensors of one unit have seen different numbers of updates. After a failure,
  // nothing has changed.
  void restore(const StatePosition& position);
  // Adds one update to the unit's number.
  void count(UnitId unit) { ++versions_[index_of(unit)]; }

  std::uint64_t of(UnitId unit) const { return versions_[index_of(unit)]; }
  // The versions of all units, in the order of the units' ids.
  std::span<const std::uint64_t> all() const { return versions_; }
  // Returns the value that StatePosition::tensor_updates has after step number `step`.
  std::map<std::string, std::uint64_t> tensor_updates(std::uint64_t step) const;

 private:
  const Layout& layout_;
  std::vector<std::uint64_t> versions_;
};

}  // namespace sluice
