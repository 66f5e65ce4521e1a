// `sluice state export` and `import` copy between durable stores and portable checkpoints. This
// file also has the functions that all of `sluice state` shares.
#pragma once

#include <string>

#include <nlohmann/json_fwd.hpp>

#include <sluice/config.h>
#include "tools/cli/output_file.h"
#include "tools/commands/state_command.h"

namespace sluice {

// Fails with kInput or kConfig.
ConfigDocument read_state_config(const StateOptions& options);
// Fails with kInput if the config names no store.
void require_store_name(const Config::Storage& storage, const StateOptions& options);

// The --json file. Before the command does anything, the output is compared with everything that
// the command reads, and is tried.
class StateJson {
 public:
  // `checkpoint` is a folder that the command reads, or "".
  // Fails with the errors of OutputFiles::check().
  StateJson(const StateOptions& options, const Config::Storage& storage,
            const std::string& checkpoint = "");
  // Does nothing if the user asked for no file.
  void write(const nlohmann::ordered_json& document);

 private:
  OutputFiles files_;
  OutputFile& output_;
};

// Both functions return an exit code. Both fail with kInput, kDamaged, kNoSpace, kUnsupported and
// others. After a failure, no incomplete result is left.
int export_state(const StateOptions& options);
int import_state(const StateOptions& options);

}  // namespace sluice
