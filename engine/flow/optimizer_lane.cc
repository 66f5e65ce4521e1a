#include "engine/flow/optimizer_lane.h"

namespace sluice {
namespace {

using Phase = OptimizerLane::Phase;
using Outcome = OptimizerLane::Outcome;

bool is_legal(Phase phase, Outcome outcome) {
  switch (outcome) {
    case Outcome::kHome: return true;
    case Outcome::kVoid: return phase != Phase::kFree;
    case Outcome::kRedo: return phase >= Phase::kUpdating;
    case Outcome::kTentative: return phase >= Phase::kUpdated;
    case Outcome::kAdopt: return phase == Phase::kWriting;
  }
  return false;
}

}  // namespace

void OptimizerLane::enter(Phase to, Outcome with) {
  SLUICE_CHECK(is_legal(to, with), "a lane's phase and its outcome fit");
  phase = to;
  outcome = with;
}

}  // namespace sluice
