// This class updates a block on the device if the home of the block's optimizer state is not the
// device. The planes of a block are copied to a slot on the device, updated there, and copied back.
// Planes that are at home on the device are updated or read in place. Three blocks can be processed
// at the same time: one is copied to the device, one is updated, and one is copied back. So copies
// in both directions overlap.
//
// Thread rule: scheduler's thread only.
// Progress: an update waits only for earlier copies and updates of this object and for one gather.
// This gather was the last to write the unit's parameters.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "engine/flow/block_update.h"
#include "engine/flow/flow_parts.h"
#include "engine/flow/resident_units.h"
#include "gpu/math/device_math.h"

namespace sluice {

class StreamedUpdates {
 public:
  // All arguments must outlive the object.
  // Requires: Placement::streams_updates.
  StreamedUpdates(const FlowParts& parts, const ResidentUnits& residents, DeviceMath* math);

  // Whether update() may be called for the block. A slot must be free. If the home of the block's
  // parameters is the device, a gather must have been queued after the last update of these
  // parameters.
  bool may_update(const BlockPlace& block) const {
    return !free_slots_.empty() && (!parameters_stay(block) || residents_.is_queued(block.unit));
  }
  // Starts the update of `block`. The record is in host memory. The parameters and the gradients
  // are on the device if the placement says so, and in host memory otherwise. `on_end` runs on the
  // scheduler's thread when the planes hold the new state. The argument of `on_end` says whether a
  // weight or a moment has overflowed. `step` is the number of the step, for the trace.
  // Requires: may_update() returns true, and the gradients are final.
  void update(const BlockPlace& block, const BlockPlanes& planes,
              const StepCoefficients& coefficients, std::uint64_t step,
              std::function<void(bool has_overflowed)> on_end);
  // The bytes copied in both directions since the last call.
  std::uint64_t take_copied_bytes() { return std::exchange(copied_bytes_, 0); }

 private:
  struct Slot {
    Event arrived;  // the planes are on the device
    Event updated;
    BlockId block{};
    std::uint64_t step = 0;
    std::uint64_t begin_ns = 0;
    std::function<void(bool)> on_end;
  };
  // Copies in one direction.
  struct Copies {
    std::vector<CopyPiece> pieces;
    void add(std::byte* target, const std::byte* source, std::uint64_t size_bytes) {
      if (size_bytes != 0) pieces.push_back({target, source, size_bytes});
    }
  };

  bool parameters_stay(const BlockPlace& block) const {
    return placement_.parameter_tier[index_of(block.id)] == Tier::kDevice;
  }
  void enqueue(const Copies& copies, StreamId stream);
  void ended(std::uint32_t slot);
  std::uint32_t* device_flag(std::uint32_t slot) const;

  const Layout& layout_;
  const Placement& placement_;
  const Tiers& tiers_;
  const ResidentUnits& residents_;
  DeviceMath* const math_;
  Device& device_;
  Scheduler& scheduler_;
  const UpdateSlot parts_;
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_slots_;
  std::uint64_t copied_bytes_ = 0;

  Stream up_;  // last members, because their callbacks use all others
  Stream update_;
  Stream down_;
};

}  // namespace sluice
