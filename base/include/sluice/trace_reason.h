// The reasons why computation waits. The names of the reasons appear in reports and in traces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include <sluice/export.h>

namespace sluice {

// The reason for a wait. A trace file holds these numbers, so the numbers must never change.
enum class TraceReason : std::uint8_t {
  kNone = 0,
  kRead = 1,            // the block's parameters are being read
  kSlot = 2,            // no parameter slot is free
  kWindow = 3,          // leases still hold the place in the window
  kCopy = 4,            // the copies to the device have not ended
  kGradientSlot = 5,    // no gradient slot is free
  kUpdateRead = 6,      // the block's update waits for its state to be read
  kUpdateLane = 7,      // the block's update waits for a lane
  kUpdate = 8,          // the block is being updated, or its update waits for the processor
  kUpdateWrite = 9,     // updated blocks are being written to their homes
  kGradientCopy = 10,   // gradients are being copied from the device
  kNorm = 11,           // the norm of the last gradients is being computed
  kCollective = 12,     // a collective waits for other ranks
  kSchedule = 13,       // the schedule has changed, so nothing could be prefetched
  kGradientSpill = 14,  // gradients are being moved to the place where they wait for the update
  kActivation = 15,     // a boundary activation, or room for one, is missing
  kCommit = 16,         // a commit of the durable store is under way
  kSave = 17,           // the block's update waits until a checkpoint has saved the block
  kAnnounce = 18,       // the ranks agree on the units that a step announces
};
inline constexpr std::size_t kTraceReasons = 19;

SLUICE_EXPORT std::string_view name_of(TraceReason reason);

}  // namespace sluice
