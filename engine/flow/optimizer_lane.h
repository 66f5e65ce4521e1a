// A lane of the optimizer pass. A lane holds one block, from the start of the block's reads to the
// end of the block's writes. The state of a lane consists of a phase and an outcome. Only the pairs
// that optimizer_lane.cc lists are legal states.
//
// Thread rule: scheduler's thread only, except where stated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <sluice/error.h>
#include "engine/plan/parameter_groups.h"
#include "engine/store/block_store.h"

namespace sluice {

struct OptimizerLane {
  static constexpr std::uint32_t kNoSlot = 0xffffffffu;

  // A lane passes through the phases in this order.
  enum class Phase : std::uint8_t { kFree, kReading, kLoaded, kUpdating, kUpdated, kWriting };
  // The outcome of a block's update. Until the update has run, the lane has the outcome that is
  // expected.
  enum class Outcome : std::uint8_t {
    kHome,       // the update goes to the block's home, and is permanent
    kTentative,  // the update is in the shadow until the coefficients are known
    kAdopt,      // the shadow that is being written becomes the home
    kRedo,       // the assumed coefficients were wrong, so the update is repeated
    kVoid,       // the step was cancelled; the lane waits for work under way to end
  };
  // The state of the block's gradients. If the gradients wait outside host memory, the lane reads
  // them before the update.
  enum class Gradients : std::uint8_t { kHere, kWanted, kComing };

  // Enters a new phase. Requires: the pair of `phase` and `outcome` is legal.
  void enter(Phase phase, Outcome outcome);
  void enter(Phase to) { enter(to, outcome); }
  // Returns whether the update is permanent as soon as the update has run.
  bool is_permanent() const { return outcome == Outcome::kHome || outcome == Outcome::kAdopt; }

  std::uint32_t index = 0;  // the lane's number; constant
  Transfer record_transfer;
  Transfer gradient_transfer;
  BlockId block{};
  std::uint32_t slot = kNoSlot;     // for the parameters, unless their home is host memory
  std::byte* parameters = nullptr;  // for Adam
  std::byte* record = nullptr;
  const std::byte* gradients = nullptr;
  std::uint64_t step = 0;         // the number of the update
  std::uint64_t version = 0;      // of the block before the update
  std::uint64_t to_version = 0;   // of the block after the update
  std::uint64_t sequence = 0;     // lanes that start later have higher numbers
  std::uint64_t begin_ns = 0;     // when the lane got its block
  StepCoefficients coefficients;  // for the worker
  std::uint32_t pending = 0;      // transfers and device copies that must end before the next phase
  Phase phase = Phase::kFree;
  Outcome outcome = Outcome::kHome;
  Gradients gradients_are = Gradients::kHere;
  bool is_assuming = false;  // for the worker: the update uses assumed coefficients
  // Whether the block makes up for updates that it has missed (engine/flow/late_updates.h).
  // `missed` contains the coefficients of these updates.
  bool is_late = false;
  std::vector<std::shared_ptr<const UnitCoefficients>> missed;
  // This member is set if a weight has overflowed in an update with assumed coefficients. The
  // overflow is an error only if the assumed coefficients turn out to be right.
  std::optional<Error> overflow;
};

}  // namespace sluice
