// The files that a config names. No output of a command may replace one of them, even if the
// command itself has no use for the file. Every command that takes a config and writes a file must
// therefore add these files to the inputs of its outputs.
//
// Thread rule: one thread.
#pragma once

#include <string>

#include <sluice/config_document.h>
#include "tools/cli/output_file.h"
#include "tools/gpt/train/train_config.h"

namespace sluice {

// Adds these files to the inputs of `files`: the config itself, the text, the tokenizer,
// storage.calibration, and the files of all durable stores on the storage paths. A store that the
// config names is protected before it is made. `config_file` is empty if no file holds the config.
// Fails with kConfig if the config is wrong.
void add_config_inputs(OutputFiles& files, const std::string& config_file,
                       const ConfigDocument& config);
// Does the same for a config in which options of the command may have replaced values.
void add_config_inputs(OutputFiles& files, const std::string& config_file,
                       const TrainConfig& config);

// Adds the files of a tokenizer. Beside a vocab.json, merges.txt belongs to them. `what` is the
// name that messages give to these files.
void add_tokenizer_inputs(OutputFiles& files, const std::string& what, const std::string& path);

// Must be called after settle_data_file(). If that call turned a text into tokens, this call
// compares the paths of all outputs with the path of the token file.
// Fails with kInput if two of the paths lead to the same file.
void compare_with_tokens(OutputFiles& files, const TrainConfig& config);

}  // namespace sluice
