// `sluice state export` copies the state of a durable store to a portable checkpoint. `sluice state
// import` copies a checkpoint to a store. This header also declares the functions that all
// subcommands of `sluice state` use.
#pragma once

#include <string>

#include <nlohmann/json_fwd.hpp>

#include <sluice/config.h>
#include <sluice/config_document.h>
#include "tools/cli/output_file.h"
#include "tools/commands/config_inputs.h"
#include "tools/commands/state_command.h"
#include "tools/gpt/train/train_config.h"

namespace sluice {

// Fails with kInput if the config cannot be read. Fails with kConfig if the config is wrong.
ConfigDocument read_state_config(const StateOptions& options);
// Fails with kInput if the config names no store.
void require_store_name(const Config::Storage& storage, const StateOptions& options);

// The output file of --json. The constructor compares the path of this file with all files that the
// command reads. The constructor also checks that the output file can be written. A command that
// cannot write the file therefore fails before it has done any work.
class StateJson {
 public:
  // `checkpoint` is the folder of a checkpoint that the command reads, or "".
  // Fails with the errors of OutputFiles::check().
  StateJson(const StateOptions& options, const ConfigDocument& config,
            const std::string& checkpoint = "");
  // Compares the path with the token file of a text that was turned into tokens.
  // Fails with kInput if both are the same file.
  void compare(const TrainConfig& config) { compare_with_tokens(files_, config); }
  // Does nothing if the user asked for no file.
  void write(const nlohmann::ordered_json& document);

 private:
  OutputFiles files_;
  OutputFile& output_;
};

// Both functions return an exit code. After a failure, no incomplete result is left. Both functions
// can fail with kInput, kDamaged, kNoSpace, kUnsupported or another error.
int export_state(const StateOptions& options);
int import_state(const StateOptions& options);

}  // namespace sluice
