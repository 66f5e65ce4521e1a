// The struct has the values that the forward pass of a micro-batch keeps for the backward pass. The
// struct also has the scratch memory of both passes. All values lie in one allocation, which is
// made at construction. If there are checkpoints at the units' boundaries, all blocks share the
// memory of one block. The caller then owns the values that cross the boundaries. All values are
// fp32, and every array starts at a multiple of 256 bytes. R is the number of rows (batch *
// sequence), and W is the width. A block keeps 16 * R * W floats and a few numbers per row. The
// scratch memory adds 6 * R * W floats, and the head adds R * vocabulary floats. If matrix products
// take bf16 factors, the scratch memory also has two arrays. Each of these arrays has 4 * R * W
// values of type bf16. The object is plain memory. The owner must put all accesses in the right
// order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/aligned_buffer.h"
#include "tools/gpt/model/batch_shape.h"
#include "tools/gpt/model/row_kernels.h"

namespace sluice::gpt {

enum class Checkpoints : std::uint8_t {
  kNone,   // all values are kept
  kUnits,  // only the values that cross from unit to unit are kept
};

struct ActivationNeeds {
  BatchShape shape;
  unsigned threads = 1;
  Checkpoints checkpoints = Checkpoints::kNone;
  bool bf16_factors = false;
};

struct BlockActivations {
  float* input = nullptr;  // [R, W], the previous block's output; null with checkpoints
  RowMoments* norm1_moments = nullptr;
  float* norm1 = nullptr;      // [R, W]
  float* qkv = nullptr;        // [R, 3 W]
  float* log_sums = nullptr;   // [R, heads]
  float* attention = nullptr;  // [R, W]
  float* middle = nullptr;     // [R, W], the residual stream after attention
  RowMoments* norm2_moments = nullptr;
  float* norm2 = nullptr;  // [R, W]
  float* mlp = nullptr;    // [R, 4 W], before GELU
  float* gelu = nullptr;   // [R, 4 W]
};

struct Activations {
  // Fails with kOutOfMemory if there is not enough memory.
  Activations(const GptConfig& config, const ActivationNeeds& needs);

  // Returns the size in bytes of the activations for `needs`. The call allocates nothing.
  static std::uint64_t size_bytes(const GptConfig& config, const ActivationNeeds& needs);

  BlockActivations& block(std::uint32_t layer) { return blocks[layer % blocks.size()]; }

  std::vector<BlockActivations> blocks;  // one for each layer, or one for all layers
  float* final_input = nullptr;          // [R, W]; null with checkpoints
  RowMoments* final_moments = nullptr;
  float* final_norm = nullptr;  // [R, W]
  float* logits = nullptr;      // [R, vocabulary], later overwritten by the logits' gradient
  float* row_losses = nullptr;  // [R]

  // The gradient of the residual stream. The shape of the gradient is [R, W]. If there are
  // checkpoints, the pointer is null.
  float* d_residual = nullptr;
  float* d_narrow = nullptr;  // [R, W]
  float* d_wide = nullptr;    // [R, 4 W]
  std::span<float> attention_scratch;
  // The factors of the current product, in bf16. Each factor has the shape [R, 4 W]. If the factors
  // are not bf16, the pointers are null.
  std::uint16_t* input_factor = nullptr;
  std::uint16_t* gradient_factor = nullptr;
  // Each of these arrays has the shape [R, W]. The arrays lie in memory that an evaluation does not
  // use for another purpose. Training uses this memory for all blocks except the first, and for the
  // backward pass. While an evaluation goes from one unit to the next, each of these arrays keeps
  // the value of one batch. There are at least two arrays, or at least five if the size of a value
  // is a multiple of 256 bytes.
  std::vector<float*> of_evaluation;

  AlignedBuffer buffer;

 private:
  class Carver;
  Activations(const GptConfig& config, Checkpoints checkpoints);  // allocates no memory
  void carve(const GptConfig& config, const ActivationNeeds& needs, Carver& carver);
  void find_places_of_evaluation(std::uint64_t value_bytes);
};

}  // namespace sluice::gpt
