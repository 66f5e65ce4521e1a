// The shape of a micro-batch, and the input checks that every computation of the GPT makes. The
// functions are pure.
#pragma once

#include <cstdint>
#include <span>

#include "tools/gpt/model/gpt_config.h"

namespace sluice::gpt {

// The largest micro-batch that one pass takes: `batch` sequences of `sequence` tokens.
struct BatchShape {
  std::uint32_t batch = 1;
  std::uint32_t sequence = 1;

  std::uint64_t rows() const { return std::uint64_t{batch} * sequence; }
  // Whether `tokens` is the number of tokens of 1 to `batch` whole sequences.
  bool takes(std::uint64_t tokens) const {
    return tokens != 0 && tokens <= rows() && tokens % sequence == 0;
  }
};

// Returns `config`.
// Fails with kConfig if validate() refuses the config. Also fails with kConfig if the shape is
// empty or exceeds model.context.
const GptConfig& checked(const GptConfig& config, BatchShape shape);

// Fails with kInput if a token is beyond the vocabulary. The message names the token.
void check_tokens(const GptConfig& config, std::span<const std::uint32_t> tokens);

}  // namespace sluice::gpt
