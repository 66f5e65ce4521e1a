// The plan of a run. It has the part of the state that each rank keeps, the budgets, the size of
// every pool, the home of every block, and the time at which blocks are updated. Only this file
// makes such a plan. The plan is used by the engine, `sluice plan`, `trace whatif`, the benches,
// the choice of the micro-batches' order and the check of the host's memory. So the results of
// these users cannot differ from the run.
//
// Thread rule: pure except for RunMachine::free_bytes; callable from any thread.
#pragma once

#include <sluice/config.h>
#include <sluice/model_spec.h>
#include <sluice/plan.h>
#include "engine/plan/layout.h"
#include "engine/plan/placement.h"

namespace sluice {

struct RunPlan {
  Placement placement;
  // The config's policy or, for "auto", the policy of a step while clipping is rare.
  OverlapPolicy policy{};
};

// The layout of a rank that keeps `shard`. `model` is validated().
// Fails with: kConfig for a parameter group that names no tensor.
Layout plan_layout(const Config& config, const ModelSpec& model, const Shard& shard = {});

// `model` is validated(); `layout` comes from plan_layout().
// Fails with: kConfig for homes that the stage does not support with several ranks, and for
// memory.unified "on" with several ranks or with a device that has its own memory; kOutOfMemory as
// plan_placement() does.
RunPlan plan_run(const Config& config, const ModelSpec& model, const Layout& layout,
                 const RunMachine& machine);

}  // namespace sluice
