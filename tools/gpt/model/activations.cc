#include "tools/gpt/model/activations.h"

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "tools/gpt/model/attention.h"

namespace sluice::gpt {

// Hands out consecutive pieces of a buffer; without a buffer it only counts.
class Activations::Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}

  template <class T>
  T* take(std::uint64_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_bytes_);
    used_bytes_ += align_up(count * sizeof(T), 256);
    return piece;
  }
  std::uint64_t used_bytes() const { return used_bytes_; }

 private:
  std::byte* base_;
  std::uint64_t used_bytes_ = 0;
};

namespace {

// Activations are beside the budgets in "memory", which the buffer's own message blames.
AlignedBuffer buffer_of(std::uint64_t size_bytes) {
  try {
    return {size_bytes, "activations"};
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kOutOfMemory) throw;
    throw Error(ErrorCode::kOutOfMemory,
                fmt::format("cannot map {} of host memory for activations, which are beside the "
                            "budgets in \"memory\"; lower batch.sequences or model.context, or set "
                            "\"activations\" to \"recompute\"",
                            format_bytes(size_bytes)));
  }
}

}  // namespace

Activations::Activations(const GptConfig& config, Checkpoints checkpoints)
    : blocks(checkpoints == Checkpoints::kUnits ? 1 : config.layers) {}

std::uint64_t Activations::size_bytes(const GptConfig& config, const ActivationNeeds& needs) {
  Carver count(nullptr);
  Activations(config, needs.checkpoints).carve(config, needs, count);
  return count.used_bytes();
}

Activations::Activations(const GptConfig& config, const ActivationNeeds& needs)
    : Activations(config, needs.checkpoints) {
  buffer = buffer_of(size_bytes(config, needs));
  Carver place(buffer.data());
  carve(config, needs, place);
  find_places_of_evaluation(align_up(needs.shape.rows() * config.embedding * sizeof(float), 256));
}

// In two pieces of memory: behind the first block, and from the first gradient on.
void Activations::find_places_of_evaluation(std::uint64_t value_bytes) {
  const auto divide = [&](float* begin, void* end) {
    auto* place = reinterpret_cast<std::byte*>(begin);
    for (; place + value_bytes <= static_cast<std::byte*>(end); place += value_bytes)
      of_evaluation.push_back(reinterpret_cast<float*>(place));
  };
  if (final_input != nullptr)
    divide(blocks.size() > 1 ? blocks[1].input : final_input, final_moments);
  divide(d_residual != nullptr ? d_residual : d_narrow, attention_scratch.data());
}

void Activations::carve(const GptConfig& config, const ActivationNeeds& needs, Carver& carver) {
  const bool keeps_all = needs.checkpoints == Checkpoints::kNone;
  const std::uint64_t rows = needs.shape.rows();
  const std::uint64_t narrow = rows * config.embedding;
  for (BlockActivations& block : blocks) {
    if (keeps_all) block.input = carver.take<float>(narrow);
    block.norm1_moments = carver.take<RowMoments>(rows);
    block.norm1 = carver.take<float>(narrow);
    block.qkv = carver.take<float>(3 * narrow);
    block.log_sums = carver.take<float>(rows * config.heads);
    block.attention = carver.take<float>(narrow);
    block.middle = carver.take<float>(narrow);
    block.norm2_moments = carver.take<RowMoments>(rows);
    block.norm2 = carver.take<float>(narrow);
    block.mlp = carver.take<float>(4 * narrow);
    block.gelu = carver.take<float>(4 * narrow);
  }
  if (keeps_all) final_input = carver.take<float>(narrow);
  final_moments = carver.take<RowMoments>(rows);
  final_norm = carver.take<float>(narrow);
  logits = carver.take<float>(rows * config.vocabulary);
  row_losses = carver.take<float>(rows);

  if (keeps_all) d_residual = carver.take<float>(narrow);
  d_narrow = carver.take<float>(narrow);
  d_wide = carver.take<float>(4 * narrow);
  const std::uint64_t scratch_floats =
      needs.threads * attention_scratch_floats(needs.shape.sequence);
  attention_scratch = {carver.take<float>(scratch_floats), scratch_floats};
  if (!needs.bf16_factors) return;
  input_factor = carver.take<std::uint16_t>(4 * narrow);
  gradient_factor = carver.take<std::uint16_t>(4 * narrow);
}

}  // namespace sluice::gpt
