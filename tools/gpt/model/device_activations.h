// The struct holds the values that the forward pass of DeviceGpt leaves on the device for the
// backward pass. The struct also holds the scratch memory of both passes. All values lie in one
// allocation, which is made at construction. Every array starts at a multiple of 256 bytes. W is
// the width, and R is the number of rows. T is the type of the parameters. An array has the type T
// unless a comment gives another type. If there are checkpoints at the units' boundaries, all
// blocks share the memory of one block. The caller then owns the values that cross the boundaries.
// The object is plain memory. The owner must put all accesses in the right order.
#pragma once

#include <cstdint>
#include <vector>

#include <sluice/device.h>
#include <sluice/dtype.h>
#include <sluice/units.h>
#include "tools/gpt/model/activations.h"
#include "tools/gpt/model/batch_shape.h"
#include "tools/gpt/model/gpt_config.h"
#include "tools/gpt/model/row_kernels.h"

namespace sluice::gpt {

struct DeviceActivationNeeds {
  const GptConfig& config;
  BatchShape shape;
  DType type = DType::kFp32;
  std::uint64_t head_group = 1;  // heads whose scores are computed together
  Checkpoints checkpoints = Checkpoints::kNone;
  std::uint32_t micro_batches = 1;  // micro-batches that are under way at the same time
};

// The values that a block's forward pass leaves for the backward pass.
struct DeviceBlock {
  std::byte* input;  // [R, W]; null with checkpoints
  RowMoments* norm1_moments;
  std::byte* norm1;      // [R, W]
  std::byte* qkv;        // [R, 3 W]
  float* log_sums;       // [batch, heads, sequence]
  std::byte* attention;  // [R, W]
  std::byte* middle;     // [R, W]
  RowMoments* norm2_moments;
  std::byte* norm2;  // [R, W]
  std::byte* mlp;    // [R, 4 W]
  std::byte* gelu;   // [R, 4 W]
};

struct DeviceActivations {
  // Fails with kOutOfMemory if the device has too little memory.
  DeviceActivations(const DeviceActivationNeeds& needs, Device& device);

  // Returns the size in bytes of the activations for `needs`. The call allocates nothing.
  static std::uint64_t size_bytes(const DeviceActivationNeeds& needs);

  // The stride of the logits' rows is a multiple of 128 elements. If rows begin at unaligned
  // addresses, matrix products are many times slower or impossible. The embedding table has no
  // additional rows: it has one row per token of the vocabulary.
  static std::uint64_t logits_stride(const GptConfig& config) {
    return align_up(config.vocabulary, 128);
  }

  const DeviceBlock& block(std::uint32_t layer) const { return blocks[layer % blocks.size()]; }
  // Returns the address at which a pass without checkpoints stores the output of a forward use. The
  // result is null for the logits.
  std::byte* output_of(std::uint32_t forward_use) const;
  // Returns the address at which a pass without checkpoints stores the gradient of a forward use's
  // output. A block overwrites the gradient of its output with the gradient of its input.
  std::byte* output_gradient_of(std::uint32_t forward_use) const;

  std::vector<DeviceBlock> blocks;   // one for each layer, or one for all layers
  std::byte* final_input = nullptr;  // [R, W]; null with checkpoints
  RowMoments* final_moments = nullptr;
  std::byte* final_norm = nullptr;  // [R, W]
  std::byte* logits = nullptr;      // [R, vocabulary], stride logits_stride(); later gradients
  float* row_losses = nullptr;      // [R]
  double* loss = nullptr;
  std::byte* d_residual = nullptr;  // [R, W]; with checkpoints, only for evaluations
  std::byte* d_narrow = nullptr;    // [R, W]
  std::byte* d_wide = nullptr;      // [R, 4 W]
  float* partials = nullptr;
  // Each array has [sequence, sequence] values for each of the heads that are computed together.
  float* scores = nullptr;
  float* d_probabilities = nullptr;
  std::byte* probabilities = nullptr;
  std::byte* d_scores = nullptr;
  std::uint32_t* inputs = nullptr;  // DeviceInputs, of all micro-batches that are under way
  // Each place has room for [R, W] values. The places lie in memory that an evaluation does not use
  // for another purpose. The places serve the same purpose as Activations::of_evaluation.
  std::vector<std::byte*> of_evaluation;

  DeviceBuffer memory;

 private:
  DeviceActivations() = default;  // allocates no memory
  // Divides the memory at `base` among the arrays. Returns the size of all arrays. If `base` is
  // null, the call only computes the size.
  std::uint64_t carve(const DeviceActivationNeeds& needs, std::byte* base);
  void find_places_of_evaluation(const DeviceActivationNeeds& needs);
};

}  // namespace sluice::gpt
