// The functions write and read the description of an engine in the engine's trace file. With this
// description, a reader can name every unit and block, and can plan the same engine again. The
// description is JSON, and docs/tracing.md lists its keys. The functions are pure.
#pragma once

#include <string>

#include <sluice/config.h>
#include <sluice/model_spec.h>
#include <sluice/plan.h>
#include "engine/plan/layout.h"
#include "engine/plan/placement.h"
#include "io/io_queue.h"

namespace sluice {

// Returns the text of the trace's section "engine". The run has `ranks` ranks. This rank may take
// `granted_cores` cores. `model` is a result of validated(). `layout` and `placement` belong to
// `config`.
std::string describe_engine(const Config& config, const ModelSpec& model, const Layout& layout,
                            const Placement& placement, std::uint32_t ranks,
                            unsigned granted_cores);

// Returns the text of the section "store", which has the totals of the storage queue.
std::string describe_counters(const IoCounters& counters);

// These functions read the parts of the section "engine" on which planning depends.
// Fails with kInput if `engine_section` is not such a section.
Config config_of_trace(const std::string& engine_section);
// Returns whether the plan chose optimizer.lanes of that config, because the run's own had none.
bool lanes_of_trace_are_planned(const std::string& engine_section);
RunMachine machine_of_trace(const std::string& engine_section);
ModelSpec model_of_trace(const std::string& engine_section);
Shard shard_of_trace(const std::string& engine_section);

}  // namespace sluice
