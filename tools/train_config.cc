#include "tools/train_config.h"

#include <cmath>
#include <numbers>

#include <fmt/format.h>

#include "base/units.h"

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
  config.learning_rate = document.number("optimizer.learning_rate");
  config.minimum_learning_rate = document.number("optimizer.minimum_learning_rate");
  config.warmup_steps = document.integer("optimizer.warmup_steps");
  config.steps = document.integer("run.steps");
  config.seed = document.integer("run.seed");
  config.trace_file = document.string("trace.file");
  config.trace_ring_bytes = document.size_bytes("trace.ring").value_or(8_MiB);
  config.device = device_from(document.string("run.device"));
  if (config.model.embedding % config.model.heads != 0)
    document.fail(
        "model.heads",
        fmt::format("\"model.heads\" is {}, which does not divide \"model.embedding\" = {}",
                    config.model.heads, config.model.embedding));
  if (config.minimum_learning_rate > config.learning_rate)
    document.fail(
        "optimizer.minimum_learning_rate",
        fmt::format(
            "\"optimizer.minimum_learning_rate\" is {}, more than \"optimizer.learning_rate\" = {}",
            config.minimum_learning_rate, config.learning_rate));
  return config;
}

double learning_rate_at(const TrainConfig& config, std::uint64_t step) {
  if (step < config.warmup_steps)
    return config.learning_rate * static_cast<double>(step + 1) /
           static_cast<double>(config.warmup_steps);
  if (config.steps <= config.warmup_steps + 1) return config.learning_rate;
  const double progress = static_cast<double>(step - config.warmup_steps) /
                          static_cast<double>(config.steps - config.warmup_steps - 1);
  const double cosine = 0.5 * (1.0 + std::cos(std::numbers::pi * std::min(progress, 1.0)));
  return config.minimum_learning_rate +
         cosine * (config.learning_rate - config.minimum_learning_rate);
}

}  // namespace sluice
