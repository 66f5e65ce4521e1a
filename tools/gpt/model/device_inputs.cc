#include "tools/gpt/model/device_inputs.h"

#include <algorithm>

namespace sluice::gpt {

DeviceInputs::DeviceInputs(const GptConfig& config, BatchShape shape, Device& device)
    : rows_(shape.rows()),
      vocabulary_(config.vocabulary),
      device_(device),
      host_(count(config, shape) * sizeof(std::uint32_t), "tokens on their way to the device"),
      uploaded_(device) {
  device_.register_host_memory(host_.span());
}

DeviceInputs::~DeviceInputs() {
  device_.unregister_host_memory(host_.span());
}

// Waits for the copy of the inputs before.
std::uint32_t* DeviceInputs::stage(std::span<const std::uint32_t> tokens,
                                   std::span<const std::uint32_t> targets) {
  device_.synchronize(uploaded_.id());
  auto* const inputs = reinterpret_cast<std::uint32_t*>(host_.data());
  std::fill(std::ranges::copy(tokens, inputs).out, inputs + rows_, 0u);
  std::fill(std::ranges::copy(targets, inputs + rows_).out, inputs + 2 * rows_, 0u);
  return inputs;
}

void DeviceInputs::send(std::uint32_t micro_batch, std::uint64_t count, StreamId stream) {
  device_.copy(reinterpret_cast<std::byte*>(place_of(micro_batch)), host_.data(),
               count * sizeof(std::uint32_t), stream);
  device_.record(uploaded_.id(), stream);
}

void DeviceInputs::bring_for_training(std::uint32_t micro_batch,
                                      std::span<const std::uint32_t> tokens,
                                      std::span<const std::uint32_t> targets, StreamId stream) {
  std::uint32_t* const inputs = stage(tokens, targets);
  // Counting sort: which positions have each token, in the order of the batch.
  std::uint32_t* const order = inputs + 2 * rows_;
  std::uint32_t* const begin = inputs + 3 * rows_;
  std::fill_n(begin, vocabulary_ + 1, 0u);
  for (const std::uint32_t token : tokens) ++begin[token + 1];
  for (std::uint64_t token = 0; token < vocabulary_; ++token) begin[token + 1] += begin[token];
  std::vector<std::uint32_t> next(begin, begin + vocabulary_);
  for (std::size_t i = 0; i < tokens.size(); ++i)
    order[next[tokens[i]]++] = static_cast<std::uint32_t>(i);
  send(micro_batch, 3 * rows_ + vocabulary_ + 1, stream);
  batch_.reset();
}

void DeviceInputs::bring(std::uint32_t batch, std::span<const std::uint32_t> tokens,
                         std::span<const std::uint32_t> targets, StreamId stream) {
  if (batch_ == batch) return;
  (void)stage(tokens, targets);
  send(0, 2 * rows_, stream);
  batch_ = batch;
}

void DeviceInputs::renew(std::uint32_t batch) {
  if (batch_ == batch) batch_.reset();
}

}  // namespace sluice::gpt
