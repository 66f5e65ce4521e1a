#include "tools/gpt/model/device_activations.h"

#include "tools/gpt/model/device_inputs.h"
#include "tools/gpt/model/device_ops.h"

namespace sluice::gpt {

DeviceActivations::DeviceActivations(const DeviceActivationNeeds& needs, Device& device)
    : memory(device, size_bytes(needs), "activations") {
  (void)carve(needs, memory.data());
  find_places_of_evaluation(needs);
}

std::uint64_t DeviceActivations::size_bytes(const DeviceActivationNeeds& needs) {
  return DeviceActivations().carve(needs, nullptr);
}

// Everything starts at a multiple of 256 bytes.
std::uint64_t DeviceActivations::carve(const DeviceActivationNeeds& needs, std::byte* base) {
  const GptConfig& config = needs.config;
  const std::uint64_t rows = needs.shape.rows();
  std::uint64_t used_bytes = 0;
  const auto take = [&](std::uint64_t count, std::uint64_t element_bytes) {
    std::byte* const piece = base == nullptr ? nullptr : base + used_bytes;
    used_bytes += align_up(count * element_bytes, 256);
    return piece;
  };
  const auto values = [&](std::uint64_t count) { return take(count, size_of(needs.type)); };
  const auto floats = [&](std::uint64_t count) {
    return reinterpret_cast<float*>(take(count, sizeof(float)));
  };
  const auto moments = [&] {
    return reinterpret_cast<RowMoments*>(take(rows, sizeof(RowMoments)));
  };
  const std::uint64_t narrow = rows * config.embedding;
  const bool keeps = needs.checkpoints == Checkpoints::kNone;
  const auto boundary = [&] { return keeps ? values(narrow) : nullptr; };
  for (std::uint32_t layer = 0; layer < (keeps ? config.layers : 1); ++layer)
    blocks.push_back({.input = boundary(),
                      .norm1_moments = moments(),
                      .norm1 = values(narrow),
                      .qkv = values(3 * narrow),
                      .log_sums = floats(rows * config.heads),
                      .attention = values(narrow),
                      .middle = values(narrow),
                      .norm2_moments = moments(),
                      .norm2 = values(narrow),
                      .mlp = values(4 * narrow),
                      .gelu = values(4 * narrow)});
  final_input = boundary();
  final_moments = moments();
  final_norm = values(narrow);
  logits = values(rows * logits_stride(config));
  row_losses = floats(rows);
  loss = reinterpret_cast<double*>(take(1, sizeof(double)));
  d_residual = values(narrow);
  d_narrow = values(narrow);
  d_wide = values(4 * narrow);
  // For the widest bias, or a norm's two parameters.
  partials = floats(sum_partials(rows, std::uint64_t{4} * config.embedding));
  const std::uint64_t score_count = needs.head_group * needs.shape.sequence * needs.shape.sequence;
  scores = floats(score_count);
  d_probabilities = floats(score_count);
  probabilities = values(score_count);
  d_scores = values(score_count);
  inputs = reinterpret_cast<std::uint32_t*>(
      take(needs.micro_batches * DeviceInputs::count(config, needs.shape), sizeof(std::uint32_t)));
  return used_bytes;
}

void DeviceActivations::find_places_of_evaluation(const DeviceActivationNeeds& needs) {
  const std::uint64_t value_bytes =
      align_up(needs.shape.rows() * needs.config.embedding * size_of(needs.type), 256);
  const auto divide = [&](std::byte* begin, const void* end) {
    for (; begin + value_bytes <= end; begin += value_bytes) of_evaluation.push_back(begin);
  };
  if (needs.checkpoints == Checkpoints::kNone)
    divide(blocks.size() > 1 ? blocks[1].input : final_input, final_moments);
  divide(d_residual, partials);
}

// The embedding is use 0, then come the blocks, the final norm, and with a tied head the logits.
std::byte* DeviceActivations::output_of(std::uint32_t forward_use) const {
  if (forward_use < blocks.size()) return blocks[forward_use].input;
  if (forward_use == blocks.size()) return final_input;
  return forward_use == blocks.size() + 1 ? final_norm : nullptr;
}

std::byte* DeviceActivations::output_gradient_of(std::uint32_t forward_use) const {
  return forward_use == blocks.size() + 1 ? d_narrow : d_residual;
}

}  // namespace sluice::gpt
