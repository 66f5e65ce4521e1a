// A lane of the optimizer pass: the place of one block, from the start of its reads to the end of
// its writes. A lane's state is a phase and an outcome, and only the pairs in optimizer_lane.cc are
// legal.
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

  // A block passes through the states in this order.
  enum class Phase : std::uint8_t { kFree, kReading, kLoaded, kUpdating, kUpdated, kWriting };
  // The fate of a block's update.
  enum class Outcome : std::uint8_t {
    kHome,       // it is permanent; before the update: it will be made as the step says
    kTentative,  // it goes to the shadow, until the coefficients are known
    kAdopt,      // it is being written to the shadow, which then becomes home
    kRedo,       // the coefficients assumed for it were wrong: it is made again
    kVoid,       // its step was cancelled: the lane only waits for work under way
  };
  // Gradients that do not wait in host memory come to the lane before the update.
  enum class Gradients : std::uint8_t { kHere, kWanted, kComing };

  // Goes on to `phase`. Requires: the pair is legal.
  void enter(Phase phase, Outcome outcome);
  void enter(Phase to) { enter(to, outcome); }
  // Whether the update, once made, is permanent.
  bool is_permanent() const { return outcome == Outcome::kHome || outcome == Outcome::kAdopt; }

  std::uint32_t index = 0;  // among the lanes; constant
  Transfer record_transfer;
  Transfer gradient_transfer;
  BlockId block{};
  std::uint32_t slot = kNoSlot;     // for its parameters, unless they are homed in host memory
  std::byte* parameters = nullptr;  // for Adam
  std::byte* record = nullptr;
  const std::byte* gradients = nullptr;
  std::uint64_t step = 0;         // the number of the update
  std::uint64_t version = 0;      // of the block; the update starts from it
  std::uint64_t to_version = 0;   // and ends with this one
  std::uint64_t sequence = 0;     // its number among starts
  std::uint64_t begin_ns = 0;     // when this one began
  StepCoefficients coefficients;  // for the worker
  std::uint32_t pending = 0;      // transfers and device copies before the next phase
  Phase phase = Phase::kFree;
  Outcome outcome = Outcome::kHome;
  Gradients gradients_are = Gradients::kHere;
  bool is_assuming = false;  // for the worker: its update with assumed coefficients is running
  // The block makes up for updates that it has missed (engine/flow/late_updates.h). The list has
  // these updates.
  bool is_late = false;
  std::vector<std::shared_ptr<const UnitCoefficients>> missed;
  // A weight has overflowed with the assumed coefficients. The overflow is an error only if the
  // assumed coefficients turn out to be right.
  std::optional<Error> overflow;
};

}  // namespace sluice
