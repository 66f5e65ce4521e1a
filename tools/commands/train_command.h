// `sluice train` trains a GPT on a text. The config says where the model's state is stored.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/commands/train_watch.h"
#include "tools/deepspeed/deepspeed_import.h"
#include "tools/gpt/train/checkpointing.h"

namespace sluice {

struct TrainOptions {
  std::string config_file;
  std::string data_file;  // empty = as in the config
  std::string tokenizer;  // empty = as in the config
  std::optional<std::uint64_t> steps;
  std::optional<std::uint64_t> seed;
  std::vector<std::string> assignments;  // --set
  std::string json_file;
  std::string csv_file;
  std::string json_lines_file;
  std::uint64_t log_every = 1;  // steps
  std::string save_file;
  std::string init_file;
  std::string trace_file;
  CheckpointOptions checkpoints;
  WatchOptions watch;
  std::optional<double> peak_flops;  // per second, of one rank
  bool measures_peak = false;
  std::uint64_t compare_memory = 0;  // steps of a comparison in memory; 0 = none
  DeepspeedValues deepspeed;         // used for a DeepSpeed file
  bool quiet = false;
};

// Returns the exit code (tools/cli/exit_codes.h).
// Fails before the first step if the config, the text, the model file, a path or a budget is wrong.
// Such a failure leaves no files behind.
int run_train(const TrainOptions& options);

}  // namespace sluice
