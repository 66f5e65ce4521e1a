// The function makes a token file for training from a text and a tokenizer.
//
// Thread rule: one thread.
#pragma once

#include "tools/gpt/train/train_config.h"

namespace sluice {

// If `config` names a tokenizer and the data file is a text, the call sets the data file to the
// token file of this text. If the token file does not exist, the call makes the token file
// (tools/gpt/text/token_file.h).
// Fails with:
// - The errors of token_file_beside() and Tokenizer.
// - kInput: the data file has the tokens of another tokenizer.
// - kConfig: the tokenizer has more tokens than model.vocabulary, or data.format says that the
//   tokens are bytes.
void settle_data_file(TrainConfig& config, bool is_quiet);

}  // namespace sluice
