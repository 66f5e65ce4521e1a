// Prepares the places into which backward uses compute gradients. A place is a gradient slot, or a
// unit's own place in the gradient set. Each use finds zeros in its place, because computation may
// add to the gradient, and may leave elements out. If computation overwrites every gradient
// (ModelSpec::overwrites_gradients), only the padding of a place has to be zero, because norms,
// sums and updates include the padding. In the set, the padding is zero from the beginning. In a
// slot, the padding is filled only if the unit before had padding in other places. With
// memory.guard, the tensors are then filled with NaN, so that the norm of the step shows an element
// that computation has left out.
//
// Thread rule: scheduler's thread only.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <sluice/device.h>
#include <sluice/ids.h>
#include "engine/flow/flow_parts.h"

namespace sluice {

class GradientZeros {
 public:
  // All parts must outlive the object. The memory of slots and set is zero.
  explicit GradientZeros(const FlowParts& parts);

  // The gradient of `unit` has left the slot.
  void left(std::uint32_t slot, UnitId unit);
  // A use of `unit` gets the slot, or the unit's place in the set. The place is prepared when the
  // event slot_event() or set_event() has occurred.
  void taken(std::uint32_t slot, UnitId unit);
  void lent(UnitId unit);
  EventId slot_event(std::uint32_t slot) const { return slot_events_[slot].id(); }
  EventId set_event() const { return set_event_.id(); }

  // The bytes of host memory that have been filled since the last call.
  std::uint64_t take_filled_bytes() { return std::exchange(filled_bytes_, 0); }

 private:
  bool have_same_padding(UnitId a, UnitId b) const;
  void fill(std::byte* target, std::uint64_t size_bytes);
  void fill_padding(std::byte* gradient, UnitId unit);
  void mark(std::byte* gradient, UnitId unit) const;

  const Layout& layout_;
  const Tiers& tiers_;
  Device& device_;
  const bool overwrites_;
  const bool marks_;
  std::vector<std::optional<UnitId>> last_units_;  // by slot; empty: all of the slot is zero
  std::vector<Event> slot_events_;                 // by slot
  std::uint64_t filled_bytes_ = 0;
  Event set_event_;
  Stream stream_;
};

}  // namespace sluice
