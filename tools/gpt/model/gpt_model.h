// The description of GPT-2 for the engine. The description has the tensors of each unit, with the
// names and shapes of the published checkpoints. The description also has the initial values, and
// the order in which the computation uses the units. The functions are pure, and any thread may
// call them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <sluice/model_spec.h>
#include "tools/gpt/model/gpt_config.h"

namespace sluice::gpt {

// The index of each tensor in UnitSpec::tensors.
enum EmbeddingTensor : std::uint32_t { kWte, kWpe, kEmbeddingTensors };
enum BlockTensor : std::uint32_t {
  kLn1Weight,
  kLn1Bias,
  kAttentionWeight,  // attn.c_attn [width, 3 * width]: query, key, value side by side
  kAttentionBias,
  kAttentionProjectionWeight,
  kAttentionProjectionBias,
  kLn2Weight,
  kLn2Bias,
  kMlpWeight,  // mlp.c_fc [width, 4 * width]
  kMlpBias,
  kMlpProjectionWeight,
  kMlpProjectionBias,
  kBlockTensors
};
enum HeadTensor : std::uint32_t { kFinalNormWeight, kFinalNormBias, kLmHeadWeight };

// Unit 0 is "embedding" (wte, wpe). The blocks are the units 1 to `layers`, with the names "h.0",
// "h.1" and so on. The last unit is "head". This unit contains ln_f, and also lm_head if the head
// is not tied. Matrices are stored as in GPT-2 (y = x W + b). Embeddings and lm_head have one row
// per token. With a tied head, the forward order ends with a second use of the embedding unit, for
// the logits. The backward order then begins with the embedding unit. The computation holds only
// one lease at a time.
// Requires: validate(config) has passed.
ModelSpec gpt_model_spec(const GptConfig& config);

// Returns the number of floating-point operations that training needs per token of a full context.
// Each multiply-add of the matrix products counts as two operations. Every product counts three
// times: once for the forward pass, once for the inputs' gradients, and once for the weights'
// gradients. Recomputation does not count. Attention is causal, so only half of the scores are
// needed, and only this half counts.
double flops_per_token(const GptConfig& config);
// Returns the part of the forward pass in these operations, for one use of each unit. The look-up
// in the embedding has none. With a tied head, each of the two uses of the embedding has half of
// the product with the embedding.
std::vector<double> forward_flops_per_token(const GptConfig& config);

// Writes the initial values of elements [begin, begin + values.size()) of `tensor`. Weights are
// drawn from N(0, 0.02). The weights of the two projections into the residual stream are scaled by
// 1 / sqrt(2 * layers) (Radford et al. 2019). Biases are 0. Layer norms have weight 1 and bias 0.
// Any split of a tensor into ranges gives the same values.
void fill_initial_values(const GptConfig& config, std::uint64_t seed, const TensorSpec& tensor,
                         std::uint64_t begin, std::span<float> values);

}  // namespace sluice::gpt
