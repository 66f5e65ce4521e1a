// The number of updates that each unit has seen, including an update under way. This number is the
// version of the unit's blocks (engine/store/block_store.h). For the optimizer's bias correction,
// this number is also the number of the unit's next update. If every step updates every unit, all
// numbers are equal. Under optimizer.untouched "skip", the numbers differ.
//
// Thread rule: one thread at a time; in an engine, the scheduler's thread changes them.
// Invariant: a frozen unit stays at 0.
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

  // The versions at `position`.
  // Fails with kInput if a tensor has seen more updates than there were, or if tensors of one unit
  // have seen different numbers of updates. After a failure, nothing has changed.
  void restore(const StatePosition& position);
  // Counts an update of the unit.
  void count(UnitId unit) { ++versions_[index_of(unit)]; }

  std::uint64_t of(UnitId unit) const { return versions_[index_of(unit)]; }
  // By unit.
  std::span<const std::uint64_t> all() const { return versions_; }
  // StatePosition::tensor_updates after update number `step`.
  std::map<std::string, std::uint64_t> tensor_updates(std::uint64_t step) const;

 private:
  const Layout& layout_;
  std::vector<std::uint64_t> versions_;
};

}  // namespace sluice
