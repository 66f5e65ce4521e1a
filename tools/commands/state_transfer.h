// `sluice state export` and `import` copy between durable stores and portable checkpoints. This
// file also has the functions that all of `sluice state` shares.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <sluice/config.h>
#include "tools/commands/state_command.h"

namespace sluice {

// Fails with: kInput, kConfig.
ConfigDocument read_state_config(const StateOptions& options);
// Fails with: kInput where the config names no store.
void require_store_name(const Config::Storage& storage, const StateOptions& options);
// Writes the --json file if the user asked for one.
void write_state_json(const StateOptions& options, const nlohmann::ordered_json& document);

// Both return an exit code. Fail with: kInput, kDamaged, kNoSpace, kUnsupported and others; no
// incomplete result is left.
int export_state(const StateOptions& options);
int import_state(const StateOptions& options);

}  // namespace sluice
