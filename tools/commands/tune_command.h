// `sluice tune` searches for settings that make a config run faster on this machine. The command
// first predicts step times with a model of the step. Then the command runs a few steps with each
// of the best settings.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/deepspeed/deepspeed_import.h"

namespace sluice {

struct TuneOptions {
  std::string config_file;
  std::vector<std::string> assignments;
  std::string data_file;          // replaces data.file; empty = as in the config
  DeepspeedValues deepspeed;      // used for a DeepSpeed file
  std::vector<std::string> kept;  // keys or sections that stay as they are
  std::uint32_t finalists = 3;    // candidates that run in addition to the given config
  std::uint32_t steps = 0;        // steps of each run; 0 = as many as `seconds` allow
  double seconds = 120;           // approximate time of all runs together
  bool dry_run = false;           // predict only
  std::optional<double> flops;    // rate of computation, for dry runs
  std::string gpu_file;           // output of `sluice bench gpu`; empty = none
  bool recalibrate = false;       // measure the machine even if there is a calibration
  double calibration_days = 30;   // an older calibration is measured again
  std::string output;             // the tuned config
  std::string json_file;
};

// Fails with:
// - kConfig: the config or an option is wrong.
// - kInput: a file cannot be read or written.
// - kOutOfMemory: no settings fit the memory.
// - kUnsupported: there are several ranks.
// After a failure, no file is written.
int run_tune(const TuneOptions& options);

}  // namespace sluice
