// The command line of `sluice config` and its subcommands, and the options that say what "auto" is
// in a DeepSpeed file.
//
// Thread rule: at start-up.
#pragma once

#include <string>

#include <CLI/CLI.hpp>

#include "tools/commands/config_command.h"
#include "tools/commands/plan_command.h"

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

// `commands` is filled in when `app` parses, and must be there by then.
void add_config(CLI::App& app, ConfigCommands& commands);

// The options of `sluice plan` about a model's file and a machine that is not this one.
void add_plan_model(CLI::App* plan, PlanOptions& options);

// --batch, --lr and the like, except --steps, which some commands have for themselves.
void add_deepspeed_values(CLI::App* command, DeepspeedValues& values);

}  // namespace sluice
