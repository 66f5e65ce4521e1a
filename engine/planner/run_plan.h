// The plan of a run. The plan contains the part of the state that each rank keeps, the budgets, the
// size of every pool, and the home of every block. The plan also says when blocks are updated. Only
// this file makes such plans. The engine, `sluice plan`, `trace whatif` and the benches use this
// plan. The code that chooses the order of the micro-batches uses this plan, too. The code that
// checks the host's memory also uses this plan. So all of this code has the same plan as the run.
//
// Thread rule: any thread may call the functions. The functions are pure, except that they call
// RunMachine::free_bytes.
#pragma once

#include <sluice/config.h>
#include <sluice/model_spec.h>
#include <sluice/plan.h>
#include "engine/plan/layout.h"
#include "engine/plan/placement.h"

namespace sluice {

struct RunPlan {
  Placement placement;
  // The policy of the config. If the config says "auto", `policy` is the policy of a step as long
  // as gradients are rarely clipped.
  OverlapPolicy policy{};
};

// The layout of a rank that keeps `shard`. `model` is a result of validated().
// Fails with kConfig if a parameter group names no tensor.
Layout plan_layout(const Config& config, const ModelSpec& model, const Shard& shard = {});

// Returns true if nothing in the config can undo an update, so that updates may begin in backward.
bool may_be_eager(const Config& config);

// `model` is a result of validated(), and `layout` is a result of plan_layout().
// Fails with:
// - kConfig: the stage does not support these homes with several ranks.
// - kConfig: memory.unified is "on", but there are several ranks, or the device has its own memory.
// - kOutOfMemory: a budget is too small, as in plan_placement().
RunPlan plan_run(const Config& config, const ModelSpec& model, const Layout& layout,
                 const RunMachine& machine);

}  // namespace sluice
