#include "tools/gpt/train/train_config.h"

#include <fmt/format.h>

#include <sluice/units.h>
#include "engine/planner/order_choice.h"
#include "tools/gpt/model/gpt_compute.h"
#include "tools/gpt/model/gpt_model.h"

namespace sluice {
namespace {

// 2^30 records, which trace_start() grants at most.
constexpr std::uint64_t kTraceRingMax = 64_GiB;

TokenFormat format_from(const std::string& name) {
  if (name == "bytes") return TokenFormat::kBytes;
  if (name == "uint32") return TokenFormat::kUint32;
  return name == "uint16" ? TokenFormat::kUint16 : TokenFormat::kAuto;
}

DeviceChoice device_from(const std::string& name) {
  if (name == "cuda") return DeviceChoice::kCuda;
  return name == "host" ? DeviceChoice::kHost : DeviceChoice::kAuto;
}

std::optional<MicroBatchOrder> order_from(const std::string& name) {
  if (name == "auto") return std::nullopt;
  return name == "vertical" ? MicroBatchOrder::kVertical : MicroBatchOrder::kHorizontal;
}

void check_order(const ConfigDocument& document, const TrainConfig& config) {
  if (config.order == MicroBatchOrder::kVertical && config.micro_batches > 1 &&
      config.engine.activations.home == ActivationHome::kKeep)
    document.fail("batch.order",
                  "\"batch.order\" is \"vertical\", which needs the activations of all "
                  "micro-batches at once, but \"activations\" is \"keep\"; choose \"recompute\", "
                  "\"host\" or \"nvme\" there");
}

}  // namespace

TrainConfig train_config(const ConfigDocument& document) {
  const auto integer32 = [&](const char* key) {
    return static_cast<std::uint32_t>(document.integer(key));
  };
  TrainConfig config;
  config.engine = engine_config(document);
  config.model = {.layers = integer32("model.layers"),
                  .heads = integer32("model.heads"),
                  .embedding = integer32("model.embedding"),
                  .context = integer32("model.context"),
                  .vocabulary = integer32("model.vocabulary"),
                  .tied_head = document.boolean("model.tied_head")};
  config.data_file = document.string("data.file");
  config.tokenizer = document.string("data.tokenizer");
  config.data_format = format_from(document.string("data.format"));
  config.validation_fraction = document.number("data.validation_fraction");
  config.sequences = integer32("batch.sequences");
  config.micro_batches = integer32("batch.micro_batches");
  config.order = order_from(document.string("batch.order"));
  static_cast<LearningRateOptions&>(config) = learning_rate_options(document);
  config.seed = document.integer("run.seed");
  config.trace_file = document.string("trace.file");
  config.trace_nvtx = document.boolean("trace.nvtx");
  config.has_status = document.string("run.status") == "auto";
  config.trace_ring_bytes = document.size_bytes("trace.ring").value_or(64_MiB);
  if (config.trace_ring_bytes > kTraceRingMax)
    document.fail("trace.ring",
                  fmt::format("\"trace.ring\" is {}, but each thread has at most {}",
                              format_bytes(config.trace_ring_bytes), format_bytes(kTraceRingMax)));
  config.device = device_from(document.string("run.device"));
  config.matmul = gpt::matmul_wish_from(document.string("run.matmul"));
  if (config.model.embedding % config.model.heads != 0)
    document.fail(
        "model.heads",
        fmt::format("\"model.heads\" is {}, which does not divide \"model.embedding\" = {}",
                    config.model.heads, config.model.embedding));
  check_order(document, config);
  config.engine.activations.micro_batches = config.micro_batches;
  config.engine.activations.order = config.order.value_or(MicroBatchOrder::kHorizontal);
  return config;
}

std::uint32_t micro_batches_at_once(const TrainConfig& config) {
  return config.order == MicroBatchOrder::kVertical ? config.micro_batches : 1;
}

gpt::Checkpoints checkpoints_of(const TrainConfig& config) {
  return config.engine.activations.home == ActivationHome::kKeep ? gpt::Checkpoints::kNone
                                                                 : gpt::Checkpoints::kUnits;
}

ModelSpec training_model(const TrainConfig& config, bool is_on_host) {
  ModelSpec model = gpt::gpt_model_spec(config.model);
  if (config.engine.activations.home != ActivationHome::kKeep)
    model.boundary_bytes = gpt::boundary_bytes(
        config.model, {.batch = config.sequences, .sequence = config.model.context},
        is_on_host ? DType::kFp32 : config.engine.precision.parameters);
  return model;
}

void resolve_order(TrainConfig& config, const RunMachine& machine) {
  if (config.micro_batches == 1) config.order = MicroBatchOrder::kHorizontal;  // they are the same
  if (!config.order) {
    const ModelSpec model = validated(training_model(config, machine.device_is_host));
    config.order = better_order(plan_orders(config.engine, model, machine), model, config.engine,
                                machine.ranks);
  }
  config.engine.activations.order = *config.order;
}

}  // namespace sluice
