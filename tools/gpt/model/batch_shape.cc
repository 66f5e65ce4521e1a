#include "tools/gpt/model/batch_shape.h"

#include <cstddef>

#include <fmt/core.h>

#include <sluice/error.h>

namespace sluice::gpt {

const GptConfig& checked(const GptConfig& config, BatchShape shape) {
  validate(config);
  if (shape.batch == 0 || shape.sequence == 0 || shape.sequence > config.context)
    throw Error(ErrorCode::kConfig,
                fmt::format("a micro-batch of {} sequences of {} tokens: both must be at least 1, "
                            "and the sequence at most model.context = {}",
                            shape.batch, shape.sequence, config.context));
  return config;
}

void check_tokens(const GptConfig& config, std::span<const std::uint32_t> tokens) {
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= config.vocabulary)
      throw Error(ErrorCode::kInput,
                  fmt::format("token {} at position {} is beyond model.vocabulary = {}; the data "
                              "was made with another tokenizer",
                              tokens[i], i, config.vocabulary));
  }
}

}  // namespace sluice::gpt
