#include "tools/commands/plan_model.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include "tools/cli/json_text.h"
#include "tools/gpt/model/gpt_model.h"
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

std::uint64_t bytes_of(double bytes) {
  return static_cast<std::uint64_t>(std::min(bytes, static_cast<double>(kPlannedBytesMax)));
}

// A micro-batch.
struct Batch {
  double tokens = 0;
  double sequence = 0;  // tokens of each

  double sequences() const { return tokens / sequence; }
  // The unit's own tokens; an encoder of sound has other ones than its decoder.
  double tokens_of(const UnitWork& work) const {
    return work.fixed_tokens == 0 ? tokens : sequences() * work.fixed_tokens;
  }
};

// The bytes of activations between units, in fp32.
std::uint64_t boundary_bytes(double width, double tokens) {
  return bytes_of(std::ceil(tokens * std::ceil(width)) * sizeof(float));
}

double value_bytes(const TrainConfig& config, bool is_on_host) {
  return is_on_host ? sizeof(float)
                    : static_cast<double>(size_of(config.engine.precision.parameters));
}

bool keeps_activations(const TrainConfig& config) {
  return config.engine.activations.home == ActivationHome::kKeep;
}

PlanModel uniform_plan(const TrainConfig& config, const PlanOptions& options, double tokens,
                       bool is_on_host) {
  if (!(*options.parameters >= options.layers && *options.parameters < 1e15))
    throw Error(ErrorCode::kConfig, fmt::format("plan: --parameters {} in {} layers",
                                                *options.parameters, options.layers));
  // Units of 12 W^2 parameters, as a transformer's block of width W has; sixteen values of width W
  // each are kept, as the GPT does.
  const double width = std::sqrt(*options.parameters / options.layers / 12);
  const double alive_layers = keeps_activations(config) ? options.layers : 1;  // or recomputed
  PlanModel model;
  model.spec = uniform_model(*options.parameters, options.layers);
  model.activation_bytes =
      bytes_of(16 * width * tokens * value_bytes(config, is_on_host) * alive_layers);
  if (!keeps_activations(config))
    model.spec.boundary_bytes.assign(options.layers - 1, boundary_bytes(width, tokens));
  return model;
}

// All layers keep values, or where they are computed again, the largest one.
double kept_values(const ZooModel& zoo, const Batch& batch, bool keeps) {
  const double of_layer = static_cast<double>(zoo.kept_values) * batch.tokens;
  const double of_fixed = static_cast<double>(zoo.fixed_kept_values) * batch.sequences();
  if (!keeps) return std::max(of_layer, of_fixed);
  const auto fixed = static_cast<double>(zoo.fixed_layers);
  return of_layer * (static_cast<double>(zoo.layers) - fixed) + of_fixed * fixed;
}

// Where the engine keeps activations: those behind each use but the last.
void add_boundaries(const ZooModel& zoo, const Batch& batch, ModelSpec& model) {
  const auto add = [&](std::size_t unit) {
    model.boundary_bytes.push_back(
        boundary_bytes(static_cast<double>(zoo.hidden), batch.tokens_of(zoo.work[unit])));
  };
  for (const UnitId unit : model.forward_order) add(index_of(unit));
  for (std::size_t i = 0; model.forward_order.empty() && i < model.units.size(); ++i) add(i);
  model.boundary_bytes.pop_back();
}

std::string sequence_text(const ZooModel& zoo, double sequence) {
  const bool is_longer =
      zoo.limit != PositionLimit::kNone && sequence > static_cast<double>(zoo.context);
  return fmt::format(
      "sequences of {:g} tokens{}", sequence,
      is_longer ? fmt::format(", more than the {} of the model's config", zoo.context) : "");
}

PlanModel zoo_plan(const TrainConfig& config, const PlanOptions& options, const ZooModel& zoo,
                   const Batch& batch, bool is_on_host) {
  PlanModel model;
  model.spec = zoo.spec;
  model.activation_bytes =
      bytes_of(kept_values(zoo, batch, keeps_activations(config)) *
               value_bytes(config, is_on_host)) +
      bytes_of(batch.tokens * static_cast<double>(zoo.vocabulary) * sizeof(float));
  if (!keeps_activations(config)) add_boundaries(zoo, batch, model.spec);
  // Scores and their products with the values; the mask leaves half of them.
  for (const UnitWork& work : zoo.work) {
    const double keys = work.fixed_tokens == 0 ? batch.sequence : work.fixed_tokens;
    model.forward_flops.push_back(
        2 * batch.tokens_of(work) *
        (work.product_elements + keys * static_cast<double>(work.attention_width)));
  }
  const double parameters = zoo.parameters();
  const std::string active =
      zoo.counts_all_experts ? ", experts per token unknown: all counted"
      : zoo.active_parameters < parameters
          ? fmt::format(", {:.4g} of {:.4g} parameters active", zoo.active_parameters, parameters)
          : "";
  model.active_parameters = zoo.active_parameters;
  model.description =
      fmt::format("{}: {}, {} layers of width {}{}{}, {}\n", options.model, zoo.architecture,
                  zoo.layers, zoo.hidden, zoo.has_tied_head ? ", a tied head" : "", active,
                  sequence_text(zoo, batch.sequence));
  model.tied = zoo.tied;
  return model;
}

// The config's GPT. Where --tokens names another batch, its activations grow with the tokens.
PlanModel config_plan(const TrainConfig& config, double micro_tokens, bool is_on_host) {
  const double factor =
      micro_tokens / (static_cast<double>(config.sequences) * config.model.context);
  const auto scaled = [factor](std::uint64_t bytes) {
    return bytes_of(std::ceil(factor * static_cast<double>(bytes)));
  };
  PlanModel model;
  model.spec = training_model(config, is_on_host);
  model.activation_bytes = scaled(kept_activation_bytes(config, is_on_host));
  for (std::uint64_t& bytes : model.spec.boundary_bytes) bytes = scaled(bytes);
  for (const double flops : gpt::forward_flops_per_token(config.model))
    model.forward_flops.push_back(flops * micro_tokens);
  return model;
}

// Tokens of a sequence: as given, if the model and the step have room for one; else what they have
// room for, but no more than a plan without a config takes.
double sequence_of(const PlanOptions& options, const ZooModel& zoo, std::uint32_t micro_batches) {
  const std::uint64_t longest = zoo.limit == PositionLimit::kTable ? zoo.context : UINT64_MAX;
  const double room = options.tokens.value_or(HUGE_VAL) / micro_batches;
  if (!options.sequence)
    return std::max(1.0,
                    std::min(static_cast<double>(std::min(zoo.context, kSequenceDefault)), room));
  if (*options.sequence > longest)
    throw Error(ErrorCode::kConfig,
                fmt::format("plan: --sequence {} is more than the {} positions for which {} has "
                            "embeddings; give --sequence {} or less",
                            *options.sequence, zoo.context, options.model, zoo.context));
  const auto sequence = static_cast<double>(*options.sequence);
  if (sequence > room)
    throw Error(
        ErrorCode::kConfig,
        fmt::format("plan: --tokens {:g} in {} micro-batches have no room for one sequence "
                    "of --sequence {}; give at least --tokens {:g}, or shorter sequences",
                    *options.tokens, micro_batches, *options.sequence, sequence * micro_batches));
  return sequence;
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
  return json_text(root, 1) + "\n";
}

PlanModel plan_model(const TrainConfig& config, const PlanOptions& options, bool is_on_host) {
  const double batch = static_cast<double>(config.sequences) * config.micro_batches;
  std::optional<ZooModel> zoo;
  if (!options.model.empty()) zoo = read_zoo_model(options.model);
  const double sequence =
      zoo ? sequence_of(options, *zoo, config.micro_batches) : config.model.context;
  const double tokens = options.tokens.value_or(batch * sequence);
  const double micro_tokens = tokens / config.micro_batches;
  PlanModel model;
  if (zoo) {
    model = zoo_plan(config, options, *zoo, {micro_tokens, sequence}, is_on_host);
  } else if (options.parameters) {
    model = uniform_plan(config, options, micro_tokens, is_on_host);
  } else {
    model = config_plan(config, micro_tokens, is_on_host);
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
