// The options of `sluice train`.
// Thread rule: one thread, at start-up.
#pragma once

#include <CLI/CLI.hpp>

#include "tools/commands/train_command.h"

namespace sluice {

// Adds the subcommand to `app`. `options` must outlive `app`.
void add_train(CLI::App& app, TrainOptions& options);

}  // namespace sluice
