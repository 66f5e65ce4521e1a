// `sluice state`: durable stores, seen from outside of a run.
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
  std::string folder;       // of `export`: checkpoints; of `import`: one, or where they are
  std::uint32_t ranks = 1;  // of `import`
  bool converts = false;    // likewise
};

void add_state(CLI::App& app, StateOptions& options);
// `state`: the parsed subcommand. `verify` fails where it has found damage.
// Fails with: kInput, kConfig, kDamaged, and what export and import fail with.
int run_state(const CLI::App& state, const StateOptions& options);

}  // namespace sluice
