// How a trace file describes the engine that wrote it. The description suffices to name every unit
// and block, and to plan the same engine again. JSON; docs/tracing.md has the keys. Pure.
#pragma once

#include <string>

#include <sluice/config.h>
#include <sluice/model_spec.h>
#include <sluice/plan.h>
#include "engine/plan/layout.h"
#include "engine/plan/placement.h"
#include "io/io_queue.h"

namespace sluice {

// The section "engine" of a run on `ranks` ranks. `model` is validated(); `layout` and `placement`
// belong to `config`.
std::string describe_engine(const Config& config, const ModelSpec& model, const Layout& layout,
                            const Placement& placement, std::uint32_t ranks);

// The text of the section "store": the totals of the storage queue.
std::string describe_counters(const IoCounters& counters);

// The parts of the section "engine" that planning depends on.
// Fails with kInput if `engine_section` is not such a section.
Config config_of_trace(const std::string& engine_section);
RunMachine machine_of_trace(const std::string& engine_section);
ModelSpec model_of_trace(const std::string& engine_section);
Shard shard_of_trace(const std::string& engine_section);

}  // namespace sluice
