// `sluice generate` continues a prompt with a saved model. The command reads the parameters of one
// unit at a time from the file, so memory holds no more than one unit.
#pragma once

#include <cstdint>
#include <string>

namespace sluice {

struct GenerateOptions {
  std::string model_file;
  std::string tokenizer;  // empty = the tokenizer in the model's folder, or bytes
  std::string prompt;
  std::uint64_t tokens = 200;
  double temperature = 0.8;
  std::uint32_t top_k = 40;  // 0 = all
  std::uint64_t seed = 1;
  unsigned threads = 0;  // 0 = the granted cores
};

// Prints the prompt, and then its continuation, token by token. Returns the exit code.
// Fails with kInput in these cases:
// - The model file cannot be used, or has weights that are not finite.
// - The prompt is empty, or the temperature is below 0.
// - There is no tokenizer, and the model does not have exactly 256 tokens, one for each byte value.
int run_generate(const GenerateOptions& options);

}  // namespace sluice
