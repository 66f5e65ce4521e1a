// The functions look for the room that a plan needs: the space on the drives, and for a plan of
// this machine also the memory and the space that `sluice train` would find here.
// Thread rule: any thread may call the functions, but only one thread may use a list of placements.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/planner/planner.h"
#include "tools/commands/plan_model.h"
#include "tools/commands/plan_subject.h"
#include "tools/report/plan_matrix.h"

namespace sluice {

// Returns the model of `sluice plan` for so many tokens a step and rank.
using ModelOfTokens = std::function<PlanModel(double tokens)>;

// Returns the largest number of tokens a step and rank for which a GPU with `gpu_bytes` has room:
// for their activations, and for the smallest pools on the device. With fewer tokens, activations
// and pools take no more. A micro-batch has at least `sequence` tokens, which is at least 1.
// Returns 0 if these do not fit. Returns nothing if those of `subject` fit, or if their activations
// are too large to be counted.
std::optional<double> most_tokens(const PlanSubject& subject, const ModelOfTokens& model_of,
                                  std::uint64_t gpu_bytes, std::uint64_t sequence,
                                  std::uint32_t ranks);

// Returns the reason why `sluice train` would refuse `planned` on this machine. The result is empty
// if `sluice train` would not refuse it, or if the plan is for another machine.
// Fails with kInput if a storage path of this machine, or its calibration, cannot be read.
std::string obstacle_here(const PlanSubject& subject, const PlannedPlacement& planned);

// Sets the obstacle of each placement for which the drives have no room. Sets the obstacle of each
// alternative that this machine has no room for, too. The config's own placement is the first one,
// and obstacle_here() says more about it. Removes its changes for which there is no room.
void check_room(const PlanSubject& subject, std::vector<PlannedPlacement>& all);

// Returns the rows of --matrix, with these obstacles.
std::vector<MatrixRow> matrix_of(const PlanSubject& subject);

}  // namespace sluice
