// The command line of `sluice tune`.
//
// Thread rule: at start-up.
#pragma once

#include <CLI/CLI.hpp>

#include "tools/commands/tune_command.h"

namespace sluice {

// Adds the subcommand to `app`. Parsing writes to `options`, which must live until `app` has
// parsed.
void add_tune(CLI::App& app, TuneOptions& options);

}  // namespace sluice
