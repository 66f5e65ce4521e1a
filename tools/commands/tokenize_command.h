// `sluice tokenize` turns a text into a token file. `sluice train` makes a token file itself if a
// tokenizer is given and the data is a text.
#pragma once

#include <string>

namespace sluice {

struct TokenizeOptions {
  std::string text_file;
  std::string tokenizer;
  std::string output_file;
};

// Returns the exit code.
// Fails with the errors of Tokenizer and write_token_file().
int run_tokenize(const TokenizeOptions& options);

}  // namespace sluice
