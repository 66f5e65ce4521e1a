// The command line of `sluice tune`.
//
// Thread rule: one thread, at start-up.
#pragma once

#include <CLI/CLI.hpp>

#include "tools/commands/tune_command.h"

namespace sluice {

// Adds the subcommand to `app`. The parser writes to `options`. `options` must live until `app` has
// parsed the command line.
void add_tune(CLI::App& app, TuneOptions& options);

}  // namespace sluice
