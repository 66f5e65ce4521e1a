#include "tools/gpt/train/train_config.h"

#include <fmt/format.h>

#include <sluice/units.h>
#include "tools/gpt/model/gpt_compute.h"
#include "tools/gpt/model/gpt_model.h"

namespace sluice {
namespace {

TokenFormat format_from(const std::string& name) {
  if (name == "bytes") return TokenFormat::kBytes;
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

ScheduleShape shape_from(const std::string& name) {
  if (name == "constant") return ScheduleShape::kConstant;
  if (name == "linear") return ScheduleShape::kLinear;
  if (name == "one_cycle") return ScheduleShape::kOneCycle;
  return name == "range_test" ? ScheduleShape::kRangeTest : ScheduleShape::kCosine;
}

ScheduleOptions schedule_from(const ConfigDocument& document) {
  ScheduleOptions schedule;
  schedule.shape = shape_from(document.string("optimizer.schedule"));
  schedule.count = document.string("optimizer.schedule_count") == "deepspeed"
                       ? ScheduleCount::kDeepspeed
                       : ScheduleCount::kSluice;
  schedule.warmup =
      document.string("optimizer.warmup") == "log" ? WarmupShape::kLog : WarmupShape::kLinear;
  schedule.warmup_start = document.number("optimizer.warmup_start");
  schedule.steps = document.find_integer("optimizer.schedule_steps");
  schedule.one_cycle = {.first_steps = document.integer("optimizer.one_cycle.first_steps"),
                        .second_steps = document.find_integer("optimizer.one_cycle.second_steps"),
                        .first_stairs = document.integer("optimizer.one_cycle.first_stairs"),
                        .second_stairs = document.find_integer("optimizer.one_cycle.second_stairs"),
                        .decay_steps = document.integer("optimizer.one_cycle.decay_steps"),
                        .decay_rate = document.number("optimizer.one_cycle.decay_rate")};
  schedule.range_test = {.step_size = document.integer("optimizer.range_test.step_size"),
                         .step_rate = document.number("optimizer.range_test.step_rate"),
                         .is_staircase = document.boolean("optimizer.range_test.staircase")};
  return schedule;
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
  config.data_format = format_from(document.string("data.format"));
  config.validation_fraction = document.number("data.validation_fraction");
  config.sequences = integer32("batch.sequences");
  config.micro_batches = integer32("batch.micro_batches");
  config.order = order_from(document.string("batch.order"));
  config.learning_rate = document.number("optimizer.learning_rate");
  config.minimum_learning_rate = document.number("optimizer.minimum_learning_rate");
  config.warmup_steps = document.integer("optimizer.warmup_steps");
  config.schedule = schedule_from(document);
  config.steps = document.integer("run.steps");
  config.seed = document.integer("run.seed");
  config.trace_file = document.string("trace.file");
  config.trace_nvtx = document.boolean("trace.nvtx");
  config.trace_ring_bytes = document.size_bytes("trace.ring").value_or(64_MiB);
  config.device = device_from(document.string("run.device"));
  config.matmul = gpt::matmul_wish_from(document.string("run.matmul"));
  if (config.model.embedding % config.model.heads != 0)
    document.fail(
        "model.heads",
        fmt::format("\"model.heads\" is {}, which does not divide \"model.embedding\" = {}",
                    config.model.heads, config.model.embedding));
  const ScheduleShape shape = config.schedule.shape;
  const bool has_minimum = shape != ScheduleShape::kConstant && shape != ScheduleShape::kRangeTest;
  if (has_minimum && config.minimum_learning_rate > config.learning_rate)
    document.fail(
        "optimizer.minimum_learning_rate",
        fmt::format(
            "\"optimizer.minimum_learning_rate\" is {}, more than \"optimizer.learning_rate\" = {}",
            config.minimum_learning_rate, config.learning_rate));
  check_order(document, config);
  config.engine.activations.micro_batches = config.micro_batches;
  config.engine.activations.order = config.order.value_or(MicroBatchOrder::kHorizontal);
  return config;
}

ModelSpec training_model(const TrainConfig& config) {
  ModelSpec model = gpt::gpt_model_spec(config.model);
  if (config.engine.activations.home != ActivationHome::kKeep)
    model.boundary_bytes = gpt::boundary_bytes(
        config.model, {.batch = config.sequences, .sequence = config.model.context});
  return model;
}

}  // namespace sluice
