// The command line of `sluice config` and its subcommands. This header also declares the options
// whose values replace "auto" in a DeepSpeed file.
//
// Thread rule: one thread, at start-up.
#pragma once

#include <string>

#include <CLI/CLI.hpp>

#include "tools/commands/config_command.h"
#include "tools/deepspeed/deepspeed_import.h"

namespace sluice {

struct ConfigCommands {
  ConfigImportOptions imported;
  ConfigShowOptions check;
  ConfigShowOptions show;
  ConfigShowOptions rates;
  ConfigDiffOptions diff;
  std::string key;

  int run(const CLI::App* config) const {
    if (config->got_subcommand("import")) return run_config_import(imported);
    if (config->got_subcommand("check")) return run_config_check(check);
    if (config->got_subcommand("show")) return run_config_show(show);
    if (config->got_subcommand("rates")) return run_config_rates(rates);
    if (config->got_subcommand("diff")) return run_config_diff(diff);
    return run_config_explain(key);
  }
};

// Adds the subcommands to `app`. The parser writes the options to `commands`. `commands` must live
// until `app` has parsed the command line.
void add_config(CLI::App& app, ConfigCommands& commands);

// Adds --batch, --lr and similar options. The function does not add --steps, because some commands
// define --steps themselves.
void add_deepspeed_values(CLI::App* command, DeepspeedValues& values);

}  // namespace sluice
