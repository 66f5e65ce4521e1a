#include "tools/commands/plan_model.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include "tools/gpt/train/run_memory.h"

namespace sluice {
namespace {

// Sequences of a plan without a config are no longer than this, whatever the model allows.
constexpr std::uint64_t kSequenceDefault = 2048;

ModelSpec uniform_model(double parameters, std::uint32_t layers) {
  ModelSpec model;
  for (std::uint32_t i = 0; i < layers; ++i)
    model.units.push_back(
        {.name = fmt::format("layer.{}", i),
         .tensors = {{.name = fmt::format("layer.{}.weight", i),
                      .shape = {static_cast<std::uint64_t>(std::ceil(parameters / layers))}}}});
  return model;
}

double elements_of(const UnitSpec& unit) {
  double elements = 0;
  for (const TensorSpec& tensor : unit.tensors)
    elements += static_cast<double>(tensor.element_count());
  return elements;
}

// At most 64 TiB, which fits nowhere and which sums over all units can hold.
std::uint64_t bytes_of(double bytes) {
  return static_cast<std::uint64_t>(std::min(bytes, 0x1p46));
}

// Where the engine keeps activations: those of a micro-batch of `tokens`, fp32, between units.
void add_boundaries(ModelSpec& model, double width, double tokens) {
  const std::size_t uses =
      model.forward_order.empty() ? model.units.size() : model.forward_order.size();
  model.boundary_bytes.assign(uses - 1,
                              bytes_of(std::ceil(tokens * std::ceil(width)) * sizeof(float)));
}

// Layers keep `values` of each token; recomputed, one layer's are alive.
std::uint64_t kept_bytes(const TrainConfig& config, double values, double layers, double tokens,
                         bool is_on_host) {
  const bool keeps = config.engine.activations.home == ActivationHome::kKeep;
  const double value_bytes =
      is_on_host ? sizeof(float) : static_cast<double>(size_of(config.engine.precision.parameters));
  return bytes_of(values * tokens * value_bytes * (keeps ? layers : 1));
}

PlanModel uniform_plan(const TrainConfig& config, const PlanOptions& options, double tokens,
                       bool is_on_host) {
  if (!(*options.parameters >= options.layers && *options.parameters < 1e15))
    throw Error(ErrorCode::kConfig, fmt::format("plan: --parameters {} in {} layers",
                                                *options.parameters, options.layers));
  // Units of 12 W^2 parameters, as a transformer's block of width W has; sixteen values of width W
  // each are kept, as the GPT does.
  const double width = std::sqrt(*options.parameters / options.layers / 12);
  PlanModel model;
  model.spec = uniform_model(*options.parameters, options.layers);
  model.activation_bytes = kept_bytes(config, 16 * width, options.layers, tokens, is_on_host);
  if (config.engine.activations.home != ActivationHome::kKeep)
    add_boundaries(model.spec, width, tokens);
  return model;
}

PlanModel zoo_plan(const TrainConfig& config, const PlanOptions& options, const ZooModel& zoo,
                   double tokens, double sequence, bool is_on_host) {
  PlanModel model;
  model.spec = zoo.spec;
  const auto values = static_cast<double>(zoo.kept_values);
  model.activation_bytes =
      kept_bytes(config, values, static_cast<double>(zoo.layers), tokens, is_on_host) +
      bytes_of(tokens * static_cast<double>(zoo.vocabulary) * sizeof(float));
  if (config.engine.activations.home != ActivationHome::kKeep)
    add_boundaries(model.spec, static_cast<double>(zoo.hidden), tokens);
  // Scores and their products with the values; the mask leaves half of them.
  for (const UnitWork& work : zoo.work)
    model.forward_flops.push_back(
        2 * tokens * work.tokens *
        (work.product_elements +
         sequence * work.tokens * static_cast<double>(work.attention_width)));
  const double parameters = zoo.parameters();
  const std::string active =
      zoo.counts_all_experts ? ", experts per token unknown: all counted"
      : zoo.active_parameters < parameters
          ? fmt::format(", {:.4g} of {:.4g} parameters active", zoo.active_parameters, parameters)
          : "";
  model.active_parameters = zoo.active_parameters;
  model.description = fmt::format("{}: {}, {} layers of width {}{}{}, sequences of {:g} tokens\n",
                                  options.model, zoo.architecture, zoo.layers, zoo.hidden,
                                  zoo.has_tied_head ? ", a tied head" : "", active, sequence);
  model.tied = zoo.tied;
  return model;
}

}  // namespace

std::string tensors_json(const PlanModel& model) {
  nlohmann::ordered_json root = {{"active_parameters", model.active_parameters},
                                 {"tied", model.tied},
                                 {"units", nlohmann::ordered_json::array()}};
  for (const UnitSpec& unit : model.spec.units) {
    nlohmann::ordered_json tensors = nlohmann::ordered_json::object();
    for (const TensorSpec& tensor : unit.tensors) tensors[tensor.name] = tensor.shape;
    root["units"].push_back({{"name", unit.name}, {"tensors", tensors}});
  }
  return root.dump(1) + "\n";
}

PlanModel plan_model(const TrainConfig& config, const PlanOptions& options, bool is_on_host) {
  const double batch = static_cast<double>(config.sequences) * config.micro_batches;
  std::optional<ZooModel> zoo;
  if (!options.model.empty()) zoo = read_zoo_model(options.model);
  double sequence = config.model.context;
  if (zoo)
    sequence = static_cast<double>(
        options.sequence.value_or(std::min<std::uint64_t>(zoo->context, kSequenceDefault)));
  const double tokens = options.tokens.value_or(batch * sequence);
  const double micro_tokens = tokens / config.micro_batches;
  PlanModel model;
  if (zoo) {
    model = zoo_plan(config, options, *zoo, micro_tokens, sequence, is_on_host);
  } else if (options.parameters) {
    model = uniform_plan(config, options, micro_tokens, is_on_host);
  } else {
    model.spec = training_model(config);
    model.activation_bytes = kept_activation_bytes(config, is_on_host);
  }
  model.tokens = tokens;
  if (!zoo)
    for (const UnitSpec& unit : model.spec.units) model.active_parameters += elements_of(unit);
  // A multiplication and an addition per parameter and token.
  for (std::size_t i = model.forward_flops.size(); i < model.spec.units.size(); ++i)
    model.forward_flops.push_back(2 * elements_of(model.spec.units[i]) * micro_tokens);
  return model;
}

}  // namespace sluice
