// `sluice state` reads and writes durable stores outside of a training run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

namespace sluice {

struct StateOptions {
  std::string config_file;
  std::vector<std::string> assignments;
  std::string json_file;
  // For `export`, `folder` is the folder in which the checkpoint is written. For `import`, `folder`
  // is a checkpoint or a folder of checkpoints.
  std::string folder;
  std::string shard_size = "5GB";  // for `export`
  bool has_sha256 = false;         // for `export`
  std::uint32_t ranks = 1;         // for `import`
  bool converts = false;           // for `import`
};

void add_state(CLI::App& app, StateOptions& options);
// Runs the subcommand that the parser found in `state`.
// Fails with:
// - kConfig: the config is wrong.
// - kInput: a file cannot be read or written, or a store does not exist or is in use.
// - kDamaged: the subcommand `verify` finds that a store is damaged.
// - The errors of export_state() and import_state().
int run_state(const CLI::App& state, const StateOptions& options);

}  // namespace sluice
