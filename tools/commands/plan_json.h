// Parts of the file that `sluice plan --json` writes (docs/cli.md).
// Thread rule: any thread. The functions are pure.
#pragma once

#include <nlohmann/json.hpp>

#include "engine/planner/planner.h"
#include "tools/report/stage_table.h"

namespace sluice {

// One row of the table of placements.
nlohmann::ordered_json json_of(const PlannedPlacement& planned);
// Returns the memory that a rank needs under one ZeRO stage.
nlohmann::ordered_json json_of(const StageMemory& stage);

}  // namespace sluice
