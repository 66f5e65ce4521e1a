// `sluice state`: durable stores, seen from outside of a run.
#pragma once

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

namespace sluice {

struct StateOptions {
  std::string config_file;
  std::vector<std::string> assignments;
  std::string json_file;
};

void add_state(CLI::App& app, StateOptions& options);
// `state`: the parsed subcommand. `verify` fails where it has found damage.
// Fails with: kInput, kConfig, kDamaged.
int run_state(const CLI::App& state, const StateOptions& options);

}  // namespace sluice
