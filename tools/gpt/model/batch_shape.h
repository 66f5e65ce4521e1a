// The shape of a micro-batch, and the checks that every computation of the GPT makes of its input.
// Pure.
#pragma once

#include <cstdint>
#include <span>

#include "tools/gpt/model/gpt_config.h"

namespace sluice::gpt {

// Largest number of tokens in one pass.
struct BatchShape {
  std::uint32_t batch = 1;
  std::uint32_t sequence = 1;

  std::uint64_t rows() const { return std::uint64_t{batch} * sequence; }
};

// Returns `config`.
// Fails with kConfig if validate() refuses the config, or the model cannot have such a shape.
const GptConfig& checked(const GptConfig& config, BatchShape shape);

// Fails with kInput if a token is beyond the vocabulary, naming the token.
void check_tokens(const GptConfig& config, std::span<const std::uint32_t> tokens);

}  // namespace sluice::gpt
