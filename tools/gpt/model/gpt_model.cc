#include "tools/gpt/model/gpt_model.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "tools/gpt/model/counter_random.h"

namespace sluice::gpt {
namespace {

TensorSpec matrix(std::string name, std::uint64_t rows, std::uint64_t columns) {
  return {.name = std::move(name), .shape = {rows, columns}, .weight_decay = WeightDecay::kApply};
}

TensorSpec vector(std::string name, std::uint64_t element_count) {
  return {.name = std::move(name), .shape = {element_count}, .weight_decay = WeightDecay::kNone};
}

UnitSpec block(const GptConfig& config, std::uint32_t layer) {
  const std::uint64_t width = config.embedding;
  const std::string unit = fmt::format("h.{}", layer);
  // In the order of BlockTensor.
  return {.name = unit,
          .tensors = {vector(unit + ".ln_1.weight", width), vector(unit + ".ln_1.bias", width),
                      matrix(unit + ".attn.c_attn.weight", width, 3 * width),
                      vector(unit + ".attn.c_attn.bias", 3 * width),
                      matrix(unit + ".attn.c_proj.weight", width, width),
                      vector(unit + ".attn.c_proj.bias", width),
                      vector(unit + ".ln_2.weight", width), vector(unit + ".ln_2.bias", width),
                      matrix(unit + ".mlp.c_fc.weight", width, 4 * width),
                      vector(unit + ".mlp.c_fc.bias", 4 * width),
                      matrix(unit + ".mlp.c_proj.weight", 4 * width, width),
                      vector(unit + ".mlp.c_proj.bias", width)}};
}

}  // namespace

ModelSpec gpt_model_spec(const GptConfig& config) {
  const std::uint64_t width = config.embedding;
  ModelSpec spec;
  spec.units.push_back({.name = "embedding",
                        .tensors = {matrix("wte.weight", config.vocabulary, width),
                                    matrix("wpe.weight", config.context, width)}});
  for (std::uint32_t layer = 0; layer < config.layers; ++layer)
    spec.units.push_back(block(config, layer));
  spec.units.push_back(
      {.name = "head", .tensors = {vector("ln_f.weight", width), vector("ln_f.bias", width)}});
  if (!config.tied_head)
    spec.units.back().tensors.push_back(matrix("lm_head.weight", config.vocabulary, width));

  for (std::uint32_t unit = 0; unit < config.layers + 2; ++unit)
    spec.forward_order.push_back(UnitId{unit});
  if (config.tied_head) spec.forward_order.push_back(UnitId{0});
  spec.backward_order.assign(spec.forward_order.rbegin(), spec.forward_order.rend());
  spec.overwrites_gradients = true;  // GptCompute and DeviceGpt write all of them
  return spec;
}

std::vector<double> forward_flops_per_token(const GptConfig& config) {
  const double width = config.embedding;
  const double logits = 2 * width * config.vocabulary;
  std::vector<double> flops(config.layers + 2, 2 * width * (12 * width + config.context));
  flops.front() = config.tied_head ? logits / 2 : 0;  // one of its two uses is a look-up
  flops.back() = config.tied_head ? 0 : logits;
  return flops;
}

double flops_per_token(const GptConfig& config) {
  const std::vector<double> forward = forward_flops_per_token(config);
  double sum = config.tied_head ? forward.front() : 0;
  for (const double flops : forward) sum += flops;
  return 3 * sum;
}

void fill_initial_values(const GptConfig& config, std::uint64_t seed, const TensorSpec& tensor,
                         std::uint64_t begin, std::span<float> values) {
  const std::string_view name = tensor.name;
  if (name.ends_with(".bias")) {
    std::fill(values.begin(), values.end(), 0.0f);
    return;
  }
  if (tensor.shape.size() == 1) {
    std::fill(values.begin(), values.end(), 1.0f);
    return;
  }
  double deviation = 0.02;
  if (name.ends_with(".c_proj.weight")) deviation /= std::sqrt(2.0 * config.layers);
  const CounterRandom random(seed, name);
  for (std::uint64_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(deviation * random.normal(begin + i));
}

}  // namespace sluice::gpt
