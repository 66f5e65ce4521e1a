// `sluice config` imports a DeepSpeed file, and shows configs without running them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/deepspeed/deepspeed_import.h"

namespace sluice {

struct ConfigImportOptions {
  std::string file;
  std::string output;
  bool as_json = false;
  bool is_lenient = false;
  DeepspeedValues values;
};

// The options of `sluice config check`, `show` and `rates`.
struct ConfigShowOptions {
  std::string file;
  std::vector<std::string> assignments;
  DeepspeedValues values;
  bool as_json = false;
  std::uint64_t steps = 0;  // for `rates`; 0 = run.steps
};

struct ConfigDiffOptions {
  std::string before;
  std::string after;
  DeepspeedValues values;
};

// Each of these functions returns the exit code (tools/cli/exit_codes.h).
// Fails with kInput if a file cannot be read or written. Fails with kConfig if a config, an option
// or a key is wrong.
int run_config_import(const ConfigImportOptions& options);
int run_config_check(const ConfigShowOptions& options);
int run_config_show(const ConfigShowOptions& options);
int run_config_rates(const ConfigShowOptions& options);
int run_config_diff(const ConfigDiffOptions& options);
int run_config_explain(const std::string& key);

}  // namespace sluice
