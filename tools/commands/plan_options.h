// The command line of `sluice plan`.
//
// Thread rule: at start-up.
#pragma once

#include <CLI/CLI.hpp>

#include "tools/commands/plan_command.h"

namespace sluice {

// Adds the subcommand to `app`. Parsing writes to `options`, which must live until `app` has
// parsed.
void add_plan(CLI::App& app, PlanOptions& options);

}  // namespace sluice
