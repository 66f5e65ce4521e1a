// Reads the config that the options of `sluice train` make.
//
// Thread rule: one thread, at start-up.
#pragma once

#include <string>

#include <sluice/error.h>
#include "tools/commands/train_command.h"
#include "tools/gpt/train/train_config.h"

namespace sluice {

// Returns the config that `options` name, with the values of the other options. If the file is a
// DeepSpeed file, `introduction` becomes the line that a run prints about the file.
// Fails with kConfig and kInput if the config is wrong or cannot be read.
TrainConfig read_train_config(const TrainOptions& options, std::string& introduction);

// Returns `error` with the options that were given in place of the config's keys.
Error in_words_of(const TrainOptions& options, const Error& error);

}  // namespace sluice
