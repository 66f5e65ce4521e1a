// The command line of `sluice plan`.
//
// Thread rule: one thread, at start-up.
#pragma once

#include <CLI/CLI.hpp>

#include "tools/commands/plan_command.h"

namespace sluice {

// Adds the subcommand to `app`. The parser writes to `options`. `options` must live until `app` has
// parsed the command line.
void add_plan(CLI::App& app, PlanOptions& options);

}  // namespace sluice
