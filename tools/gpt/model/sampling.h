// Chooses the next token from the logits of a model. The function is pure, and any thread may call
// it.
#pragma once

#include <cstdint>
#include <span>

namespace sluice::gpt {

struct SamplingOptions {
  double temperature = 1.0;  // 0 = the most probable token; larger values give more variety
  std::uint32_t top_k = 0;   // only the k most probable tokens; 0 means all
  std::uint64_t seed = 0;
};

// Returns the token at `position` of a generation. The token is drawn from softmax(logits /
// temperature) over the top_k largest logits. If two logits are equal, the token with the smaller
// number ranks higher. The random number depends only on (seed, position).
// Requires: logits are not empty and have no NaN, and temperature >= 0.
std::uint32_t sample_token(std::span<const float> logits, const SamplingOptions& options,
                           std::uint64_t position);

}  // namespace sluice::gpt
