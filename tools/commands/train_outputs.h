// The files that a training run writes, and the files that it must not touch. Rank 0 writes for all
// ranks, except that each rank writes its own trace.
//
// Thread rule: one thread.
#pragma once

#include <cstdint>
#include <string>

#include "tools/cli/output_file.h"
#include "tools/commands/train_command.h"
#include "tools/gpt/train/train_config.h"
#include "tools/gpt/train/train_ranks.h"

namespace sluice {

struct TrainOutputs {
  // The constructor compares all files and checks each output.
  // Fails with the errors of OutputFiles::check().
  // At this time, `config.data_file` is still the text. Turning the text into tokens can take
  // minutes and leaves a file.
  TrainOutputs(const TrainOptions& options, const TrainConfig& config, const TrainRanks& ranks);

  // If the text was turned into tokens, the call compares all files with the file of the tokens.
  // Fails with kInput in the cases of OutputFiles::check().
  void compare_with_tokens(const TrainConfig& config);

  OutputFiles files;
  OutputFile& save;
  OutputFile& json;
  OutputFile& csv;
  OutputFile& json_lines;
  OutputFile& trace;
  OutputFile& events;

 private:
  OutputFile& add(const char* option, const std::string& path, const TrainRanks& ranks);
};

}  // namespace sluice
