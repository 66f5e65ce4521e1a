#include "tools/gpt/train/run_settings.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <span>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include "engine/plan/sharding.h"
#include "engine/planner/order_choice.h"
#include "io/checksum.h"
#include "tools/gpt/text/token_file.h"

namespace sluice {
namespace {

constexpr std::size_t kSummedPieceBytes = 4 << 20;
constexpr const char* kReduction = "sharding.reduction";
constexpr const char* kUntouched = "optimizer.untouched";
constexpr const char* kGroup = "sharding.group";
constexpr const char* kSums = "sums of micro-batches";

// How the file's bytes are read: the same for "auto" and for the format that it finds.
std::string_view format_of(const TrainConfig& config) {
  if (config.data_format != TokenFormat::kBytes && has_token_header(config.data_file))
    return "by the file's header";
  if (config.data_format == TokenFormat::kUint16) return "uint16";
  return config.data_format == TokenFormat::kUint32 ? "uint32" : "bytes";
}

// A lazy update makes the bits of one that comes in each step.
UntouchedPolicy same_bits_as(UntouchedPolicy policy) {
  return policy == UntouchedPolicy::kSkip ? policy : UntouchedPolicy::kUpdate;
}

}  // namespace

std::map<std::string, std::string> settings_of(const TrainConfig& config, std::uint32_t ranks) {
  const Config& engine = config.engine;
  const LossScaleOptions& scale = engine.precision.loss_scale;
  std::map<std::string, std::string> settings;
  const auto add = [&](const char* key, const auto& value) {
    settings[key] = fmt::format("{}", value);
  };
  add("ranks", ranks);
  add("batch.sequences", config.sequences);
  add("batch.micro_batches", config.micro_batches);
  if (config.order &&
      order_changes_bits(engine, config.micro_batches, config.model.tied_head, ranks))
    add("batch.order", name_of(*config.order));
  add("data.format", format_of(config));
  add("data.validation_fraction", config.validation_fraction);
  add("model.heads", config.model.heads);
  add("optimizer.learning_rate", config.learning_rate);
  add("optimizer.minimum_learning_rate", config.minimum_learning_rate);
  add("optimizer.warmup_steps", config.warmup_steps);
  add("optimizer.schedule", describe(config.schedule));
  add("optimizer.beta1", engine.optimizer.adam.beta1);
  add("optimizer.beta2", engine.optimizer.adam.beta2);
  add("optimizer.epsilon", engine.optimizer.adam.epsilon);
  add("optimizer.weight_decay", engine.optimizer.adam.weight_decay);
  add("optimizer.momentum", engine.optimizer.momentum);
  add("optimizer.clip_norm", engine.optimizer.clip_norm);
  add("optimizer.clip_epsilon", engine.optimizer.clip_epsilon);
  add("optimizer.non_finite", name_of(engine.optimizer.non_finite));
  add(kUntouched, name_of(same_bits_as(engine.optimizer.untouched)));
  if (engine.optimizer.state == OptimizerState::kBf16)
    add("optimizer.rounding_seed", engine.optimizer.rounding_seed);
  for (std::size_t i = 0; i < engine.optimizer.groups.size(); ++i) {
    const Config::Optimizer::Group& group = engine.optimizer.groups[i];
    settings[fmt::format("optimizer.groups[{}]", i)] =
        fmt::format("{} {} {}", fmt::join(group.tensors, " "), group.learning_rate_factor,
                    group.weight_decay.value_or(-1));
  }
  add("precision.gradients", name_of(engine.precision.gradients));
  add("precision.loss_scale",
      fmt::format("{} {} {} {} {} {}", scale.static_scale, scale.initial_scale_power, scale.window,
                  scale.hysteresis, scale.consecutive_hysteresis, scale.minimum));
  if (ranks > 1) {
    const Shard shard = shard_of(engine.sharding, 0, ranks);
    add(kGroup, shard.count);
    add(kSums,
        reduces_each_use(shard, config.micro_batches, config.order.value_or(MicroBatchOrder{}))
            ? "of all ranks"
            : "of each rank first");
    settings[kReduction] =
        engine.sharding.reduction == RankReduction::kNodes && engine.sharding.node_ranks < ranks
            ? fmt::format("nodes of {} ranks", engine.sharding.node_ranks)
            : std::string(name_of(engine.sharding.reduction));
  }
  add("run.seed", config.seed);
  add("run.steps", config.steps);
  return settings;
}

std::optional<std::string> value_before(const std::map<std::string, std::string>& saved,
                                        const std::string& key) {
  if (const auto found = saved.find(key); found != saved.end()) {
    const bool is_lazy = key == kUntouched && found->second == name_of(UntouchedPolicy::kLazy);
    return is_lazy ? std::string(name_of(UntouchedPolicy::kUpdate)) : found->second;
  }
  if (key == "optimizer.schedule") return describe(ScheduleOptions{});
  if (key == kReduction) return std::string(name_of(RankReduction::kExact));
  if (key == kUntouched) return std::string(name_of(UntouchedPolicy::kUpdate));
  if (key == "optimizer.clip_epsilon") return "0";
  constexpr std::array kUnknown{"batch.order",
                                "data.format",
                                "model.heads",
                                "optimizer.non_finite",
                                "optimizer.rounding_seed",
                                kGroup,
                                kSums,
                                kProducts};
  if (std::ranges::find(kUnknown, key) != kUnknown.end()) return std::nullopt;
  return "nothing";
}

bool follows_ranks(const std::string& key) {
  return key == "ranks" || key == kGroup || key == kSums;
}

std::string application_for(const TrainConfig& config, std::uint32_t ranks, std::uint64_t steps) {
  return nlohmann::json{{"steps", steps},
                        {"settings", settings_of(config, ranks)},
                        {"text", describe_text(config.data_file)}}
      .dump();
}

std::optional<std::string> saved_setting(const std::string& application, const std::string& key) {
  const auto text = nlohmann::json::parse(application, nullptr, /*allow_exceptions=*/false);
  if (!text.is_object() || !text.contains("settings")) return std::nullopt;
  const nlohmann::json& settings = text["settings"];
  if (!settings.is_object() || !settings.contains(key) || !settings[key].is_string())
    return std::nullopt;
  return settings[key].get<std::string>();
}

// The checksum of the checksums of its pieces, so that none of it has to be in memory.
std::string describe_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file)
    throw Error(ErrorCode::kInput, fmt::format("\"{}\" (data.file) cannot be opened", path));
  std::vector<char> piece(kSummedPieceBytes);
  std::string sums;
  std::uint64_t bytes = 0;
  while (file) {
    file.read(piece.data(), static_cast<std::streamsize>(piece.size()));
    const auto got = static_cast<std::size_t>(file.gcount());
    if (file.bad())
      throw Error(ErrorCode::kIo, fmt::format("\"{}\" (data.file) cannot be read behind byte {}; "
                                              "check the drive (dmesg)",
                                              path, bytes));
    if (got == 0) break;
    sums += hex_of(checksum128(std::as_bytes(std::span(piece).first(got))));
    bytes += got;
  }
  return fmt::format("{} bytes, checksum {}", bytes,
                     hex_of(checksum128(std::as_bytes(std::span(sums)))));
}

}  // namespace sluice
