// The shape of a GPT-2 model, as given by the section "model" of a config file. The struct is plain
// data. The functions are pure, and any thread may call them.
#pragma once

#include <cstdint>

namespace sluice::gpt {

struct GptConfig {
  std::uint32_t layers = 6;
  std::uint32_t heads = 6;
  std::uint32_t embedding = 192;  // width of the residual stream
  std::uint32_t context = 128;    // longest sequence
  std::uint32_t vocabulary = 256;
  bool tied_head = true;  // true: logits come from wte.weight; false: from lm_head.weight

  std::uint32_t head_width() const { return embedding / heads; }
};

// Fails with kConfig if an extent is zero or beyond its limit, or if `embedding` is not a multiple
// of `heads`. The message names the key, its value and the remedy.
void validate(const GptConfig& config);

}  // namespace sluice::gpt
