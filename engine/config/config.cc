#include <sluice/config.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <initializer_list>
#include <optional>
#include <system_error>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/config_document.h>
#include <sluice/error.h>
#include "base/float_environment.h"
#include "cpu_optim/optimizer_options.h"
#include "engine/config/config_schema_check.h"
#include "engine/config/config_text.h"
#include "engine/config/micro_batch_limit.h"

namespace sluice {
namespace {

// Beyond this, a drive gains nothing, and every buffer has a thread.
constexpr std::uint32_t kSaveBuffersMax = 16;
// Within these, neither the scaled gradients of an ordinary model nor the inverse become denormal.
constexpr double kStaticScaleMin = 0x1p-64;
constexpr double kStaticScaleMax = 0x1p64;
// As the schema says.
constexpr std::uint32_t kOptimizerLanesMax = 65536;
constexpr unsigned kThreadsMax = 4096;
constexpr std::uint64_t kBlockElementsLimit = std::uint64_t{1} << 28;
constexpr double kWeightMax = 1e15;
constexpr double kScaleMinimumMax = 1e38;
constexpr double kRankTimeoutMin = 0.1;
constexpr double kRankTimeoutMax = 86400;
bool is_static_scale(double scale) {
  return scale == 0 || (scale >= kStaticScaleMin && scale <= kStaticScaleMax);
}

// The value of an enumeration by its name in the schema, which has refused all other names.
template <class Value>
Value named(const std::string& name, std::initializer_list<Value> values) {
  for (const Value value : values) {
    if (name == name_of(value)) return value;
  }
  throw Error(ErrorCode::kInternal,
              fmt::format("the schema allows \"{}\", the engine does not", name));
}

DType dtype_from(const std::string& name) {
  return named(name, {DType::kBf16, DType::kFp16, DType::kFp32});
}

TierChoice tier_from(const std::string& name) {
  using enum TierChoice;
  return named(name, {kAuto, kDevice, kHost, kNvme});
}

IoBackend backend_from(const std::string& name) {
  using enum IoBackend;
  return named(name, {kAuto, kUring, kThreads, kSync});
}

ActivationHome activations_from(const std::string& name) {
  using enum ActivationHome;
  return named(name, {kKeep, kRecompute, kHost, kNvme});
}

OptimizerKind optimizer_from(const std::string& name) {
  using enum OptimizerKind;
  return named(name, {kAdamW, kAdam, kLion, kAdagrad, kSgd});
}

OptimizerState optimizer_state_from(const std::string& name) {
  return named(name, {OptimizerState::kFp32, OptimizerState::kBf16, OptimizerState::k8bit});
}

OverlapPolicy overlap_from(const std::string& name) {
  using enum OverlapPolicy;
  return named(name, {kAuto, kEager, kDeferred, kSpeculative, kSerial});
}

UnifiedMemory unified_from(const std::string& name) {
  using enum UnifiedMemory;
  return named(name, {kAuto, kOff, kOn});
}

GuardMode guard_from(const std::string& name) {
  using enum GuardMode;
  return named(name, {kAuto, kOff, kOn});
}

RoomCheck room_check_from(const std::string& name) {
  using enum RoomCheck;
  return named(name, {kError, kWarn, kOff});
}

// The name becomes part of file names.
bool is_store_name(const std::string& name) {
  return name.size() <= 64 && !name.starts_with('.') &&
         std::ranges::all_of(name, [](unsigned char c) {
           return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.';
         });
}

std::string describe_store_name(const std::string& name) {
  return fmt::format(
      "\"{}\", but must be at most 64 letters, digits, '-', '_' and '.', not beginning with '.'",
      name);
}

// Nothing if each folder is there once. A folder that is there twice would have two queues and one
// drive, and its files would count twice.
std::string repeated_folder(const std::vector<std::string>& paths) {
  std::error_code none;
  for (auto path = paths.begin(); path != paths.end(); ++path) {
    for (auto other = paths.begin(); other != path; ++other) {
      if (*other == *path || std::filesystem::equivalent(*other, *path, none))
        return fmt::format("\"{}\" and \"{}\" are the same folder; name each folder once", *other,
                           *path);
    }
  }
  return {};
}

Config::Storage storage_config(const ConfigDocument& document) {
  Config::Storage storage;
  storage.paths = document.strings("storage.paths");
  if (std::ranges::find(storage.paths, "") != storage.paths.end())
    document.fail("storage.paths", "\"storage.paths\" has an empty path; name a folder");
  if (const std::string why = repeated_folder(storage.paths); !why.empty())
    document.fail("storage.paths", fmt::format("\"storage.paths\": {}", why));
  storage.weights = document.numbers("storage.weights");
  storage.calibration = document.string("storage.calibration");
  if (!storage.weights.empty() && storage.weights.size() != storage.paths.size())
    document.fail(
        "storage.weights",
        fmt::format("\"storage.weights\" has {} entries and \"storage.paths\" has {}, but "
                    "each path needs one weight",
                    storage.weights.size(), storage.paths.size()));
  if (!storage.weights.empty() && !storage.calibration.empty())
    document.fail("storage.calibration",
                  "\"storage.calibration\" and \"storage.weights\" are both given, but one of them "
                  "decides; remove the other");
  storage.block_elements = document.find_integer("storage.block_elements");
  if (storage.block_elements && *storage.block_elements % 4096 != 0)
    document.fail("storage.block_elements",
                  fmt::format("\"storage.block_elements\" is {}, but must be a multiple of 4096",
                              *storage.block_elements));
  storage.backend = backend_from(document.string("storage.backend"));
  storage.queue_depth = static_cast<std::uint32_t>(document.integer("storage.queue_depth"));
  storage.verify =
      named(document.string("storage.verify"), {Verify::kFull, Verify::kSample, Verify::kOff});
  storage.timeout_s = document.number("storage.timeout");
  storage.state.name = document.string("storage.state.name");
  if (!is_store_name(storage.state.name))
    document.fail("storage.state.name",
                  "\"storage.state.name\" is " + describe_store_name(storage.state.name));
  storage.state.commit_every =
      static_cast<std::uint32_t>(document.integer("storage.state.commit_every"));
  return storage;
}

std::vector<Config::Optimizer::Group> groups_from(const ConfigDocument& document) {
  std::vector<Config::Optimizer::Group> groups;
  for (std::size_t i = 0; i < document.entry_count("optimizer.groups"); ++i) {
    const std::string key = fmt::format("optimizer.groups.{}", i);
    groups.push_back({.tensors = document.strings(key + ".tensors"),
                      .learning_rate_factor = document.number(key + ".learning_rate_factor"),
                      .weight_decay = document.find_number(key + ".weight_decay")});
    if (groups.back().tensors.empty())
      document.fail("optimizer.groups",
                    fmt::format("group {} lacks \"tensors\", the list of its names", i));
  }
  return groups;
}

void require(bool condition, const char* member, const std::string& rule) {
  if (!condition) throw Error(ErrorCode::kConfig, fmt::format("Config::{}: {}", member, rule));
}

struct Contradiction {
  const char* key;  // of the value to change, in files and in Config
  const char* why;
};

// Values that do not go together.
std::optional<Contradiction> contradiction_in(const Config& config) {
  const Config::Optimizer& optimizer = config.optimizer;
  const bool is_eager = optimizer.overlap == OverlapPolicy::kEager;
  if (is_eager && (optimizer.clip_norm != 0 || optimizer.non_finite != NonFinitePolicy::kStop))
    return Contradiction{"optimizer.overlap",
                         "eager updates before the last gradient is known, so it needs clip_norm 0 "
                         "and non_finite stop; choose speculative, deferred or auto"};
  if (is_eager && config.precision.scale_moves())
    return Contradiction{
        "optimizer.overlap",
        "eager updates before an overflow is known, so it needs a static loss scale"};
  const auto may_be_on_device = [](TierChoice choice) {
    return choice == TierChoice::kAuto || choice == TierChoice::kDevice;
  };
  const Config::Placement& placement = config.placement;
  if (placement.optimizer == TierChoice::kDevice &&
      !(may_be_on_device(placement.parameters) && may_be_on_device(placement.gradients)))
    return Contradiction{
        "placement.optimizer",
        "device updates parameters and reads gradients where they are, so placement.parameters and "
        "placement.gradients must be auto or device, too"};
  return std::nullopt;
}

// A trace has the config as a file has it, and is read like one. So what no file can say is
// refused, too: values that the checks above do not look at, and numbers that name no value.
void validate_as_text(const Config& config) {
  const FloatEnvironment environment;  // how a number is read depends on the rounding
  check_against_schema(nlohmann::json::parse(config_text(config)), config_schema(), "",
                       [](const std::string& key, const std::string& message) {
                         require(false, key.c_str(), message);
                       });
}

void validate_loss_scale(const LossScaleOptions& scale) {
  require(is_static_scale(scale.static_scale), "precision.loss_scale.static_scale",
          fmt::format("{} is neither 0 nor in {}..{} (2^-64..2^64), beyond which gradients or the "
                      "factor that takes the scale out again lose bits",
                      scale.static_scale, kStaticScaleMin, kStaticScaleMax));
  require(scale.window >= 1 && scale.hysteresis >= 1 && scale.initial_scale_power <= 32 &&
              scale.minimum >= 0 && scale.minimum <= kScaleMinimumMax,
          "precision.loss_scale",
          fmt::format("window is {} and hysteresis {}, and both must be at least 1; "
                      "initial_scale_power is {}, and must be at most 32; minimum is {}, and must "
                      "be in 0..{}",
                      scale.window, scale.hysteresis, scale.initial_scale_power, scale.minimum,
                      kScaleMinimumMax));
}

void validate_sharding(const Config::Sharding& sharding) {
  require(sharding.stage <= 3, "sharding.stage", fmt::format("{} is not in 0..3", sharding.stage));
  require(!sharding.group_is_node || sharding.group_ranks == 0, "sharding.group_ranks",
          fmt::format("{} and group_is_node are both set, but one of them decides",
                      sharding.group_ranks));
  require(sharding.timeout_s >= kRankTimeoutMin && sharding.timeout_s <= kRankTimeoutMax,
          "sharding.timeout_s",
          fmt::format("{} is not in {}..{}", sharding.timeout_s, kRankTimeoutMin, kRankTimeoutMax));
}

void validate_storage(const Config::Storage& storage) {
  require(!storage.paths.empty() && std::ranges::find(storage.paths, "") == storage.paths.end(),
          "storage.paths", "must name at least one folder, and each has a name");
  const std::string repeated = repeated_folder(storage.paths);
  require(repeated.empty(), "storage.paths", repeated);
  require(storage.weights.empty() || storage.weights.size() == storage.paths.size(),
          "storage.weights",
          fmt::format("{} weights for {} paths; each needs one", storage.weights.size(),
                      storage.paths.size()));
  for (const double weight : storage.weights)
    require(weight > 0 && weight <= kWeightMax, "storage.weights",
            fmt::format("{} is not positive and at most {}", weight, kWeightMax));
  require(storage.weights.empty() || storage.calibration.empty(), "storage.calibration",
          "cannot be given beside storage.weights");
  require(storage.queue_depth >= 1 && storage.queue_depth <= 4096, "storage.queue_depth",
          fmt::format("{} is not in 1..4096", storage.queue_depth));
  require(storage.state.commit_every >= 1, "storage.state.commit_every",
          "must be at least 1 update");
  require(is_store_name(storage.state.name), "storage.state.name",
          describe_store_name(storage.state.name));
  require(storage.timeout_s >= 0 && storage.timeout_s <= 86400, "storage.timeout_s",
          fmt::format("{} is not in 0..86400", storage.timeout_s));
  if (storage.block_elements) {
    const std::uint64_t count = *storage.block_elements;
    require(count >= 4096 && count % 4096 == 0 && count <= kBlockElementsLimit,
            "storage.block_elements",
            fmt::format("{} is not a multiple of 4096 in 4096..{}", count, kBlockElementsLimit));
  }
}

}  // namespace

Config engine_config(const ConfigDocument& document) {
  Config config;
  config.precision.parameters = dtype_from(document.string("precision.parameters"));
  const std::string gradients = document.string("precision.gradients");
  config.precision.gradients =
      gradients == "auto" ? config.precision.parameters : dtype_from(gradients);
  config.precision.loss_scale = {
      .static_scale = document.number("precision.loss_scale.static"),
      .initial_scale_power =
          static_cast<std::uint32_t>(document.integer("precision.loss_scale.initial_power")),
      .window = static_cast<std::uint32_t>(document.integer("precision.loss_scale.window")),
      .hysteresis = static_cast<std::uint32_t>(document.integer("precision.loss_scale.hysteresis")),
      .consecutive_hysteresis = document.boolean("precision.loss_scale.consecutive_hysteresis"),
      .minimum = document.number("precision.loss_scale.minimum")};
  if (!is_static_scale(config.precision.loss_scale.static_scale))
    document.fail("precision.loss_scale.static",
                  fmt::format("\"precision.loss_scale.static\" is {}, but must be 0, or at least "
                              "{} (2^-64)",
                              config.precision.loss_scale.static_scale, kStaticScaleMin));
  config.optimizer.kind = optimizer_from(document.string("optimizer.type"));
  config.optimizer.state = optimizer_state_from(document.string("optimizer.state"));
  config.optimizer.rounding_seed =
      static_cast<std::uint64_t>(document.integer("optimizer.rounding_seed"));
  config.optimizer.momentum = document.number("optimizer.momentum");
  config.optimizer.adam = {.beta1 = document.number("optimizer.beta1"),
                           .beta2 = document.number("optimizer.beta2"),
                           .epsilon = document.number("optimizer.epsilon"),
                           .weight_decay = document.number("optimizer.weight_decay")};
  config.optimizer.groups = groups_from(document);
  config.optimizer.clip_norm = document.number("optimizer.clip_norm");
  config.optimizer.clip_epsilon = document.number("optimizer.clip_epsilon");
  config.optimizer.non_finite = named(document.string("optimizer.non_finite"),
                                      {NonFinitePolicy::kStop, NonFinitePolicy::kSkip});
  config.optimizer.untouched =
      named(document.string("optimizer.untouched"),
            {UntouchedPolicy::kUpdate, UntouchedPolicy::kSkip, UntouchedPolicy::kLazy});
  config.optimizer.lazy_max = static_cast<std::uint32_t>(document.integer("optimizer.lazy_max"));
  config.optimizer.overlap = overlap_from(document.string("optimizer.overlap"));
  config.optimizer.update_on = named(document.string("optimizer.update_on"),
                                     {UpdateProcessor::kCpu, UpdateProcessor::kDevice});
  if (const auto lanes = document.find_integer("optimizer.lanes"))
    config.optimizer.lanes = static_cast<std::uint32_t>(*lanes);
  config.memory.device_bytes = document.size_bytes("memory.device");
  config.memory.host_bytes = document.size_bytes("memory.host");
  config.memory.check = room_check_from(document.string("memory.check"));
  config.memory.save_buffers = static_cast<std::uint32_t>(document.integer("memory.save_buffers"));
  config.memory.unified = unified_from(document.string("memory.unified"));
  config.memory.guard = guard_from(document.string("memory.guard"));
  config.placement.parameters = tier_from(document.string("placement.parameters"));
  config.placement.optimizer = tier_from(document.string("placement.optimizer"));
  config.placement.gradients = tier_from(document.string("placement.gradients"));
  config.activations.home = activations_from(document.string("activations"));
  config.storage = storage_config(document);
  config.sharding.stage = static_cast<std::uint32_t>(document.integer("sharding.stage"));
  const std::optional<std::string> group = document.find_string("sharding.group");
  config.sharding.group_is_node = group == "node";
  if (!group)
    config.sharding.group_ranks = static_cast<std::uint32_t>(document.integer("sharding.group"));
  config.sharding.keep_gathered_bytes =
      document.size_bytes("sharding.keep_gathered").value_or(config.sharding.keep_gathered_bytes);
  config.sharding.reduction =
      named(document.string("sharding.reduction"),
            {RankReduction::kExact, RankReduction::kNccl, RankReduction::kNodes});
  config.sharding.node_ranks = static_cast<std::uint32_t>(document.integer("sharding.node_ranks"));
  config.sharding.timeout_s = document.number("sharding.timeout");
  config.threads = static_cast<unsigned>(document.find_integer("run.threads").value_or(0));
  if (const auto found = contradiction_in(config))
    document.fail(found->key, fmt::format("\"{}\": {}", found->key, found->why));
  return config;
}

void validate(const Config& config) {
  require(config.memory.save_buffers <= kSaveBuffersMax, "memory.save_buffers",
          fmt::format("{} is not in 0..{}", config.memory.save_buffers, kSaveBuffersMax));
  const AdamOptions& adam = config.optimizer.adam;
  require(adam.beta1 >= 0 && adam.beta1 < 1, "optimizer.adam.beta1",
          fmt::format("{} is not in [0, 1)", adam.beta1));
  require(adam.beta2 >= 0 && adam.beta2 < 1, "optimizer.adam.beta2",
          fmt::format("{} is not in [0, 1)", adam.beta2));
  require(adam.epsilon >= kEpsilonMin, "optimizer.adam.epsilon",
          fmt::format("{} is less than {}, below which fp32 loses precision and has no numbers",
                      adam.epsilon, kEpsilonMin));
  require(adam.epsilon <= kEpsilonMax, "optimizer.adam.epsilon",
          fmt::format("{} is more than {}, the largest number of fp32", adam.epsilon, kEpsilonMax));
  require(adam.weight_decay >= 0 && std::isfinite(adam.weight_decay), "optimizer.adam.weight_decay",
          fmt::format("{} is not finite and at least 0", adam.weight_decay));
  require(config.optimizer.momentum >= 0 && config.optimizer.momentum < 1, "optimizer.momentum",
          fmt::format("{} is not in [0, 1)", config.optimizer.momentum));
  for (const Config::Optimizer::Group& group : config.optimizer.groups) {
    require(!group.tensors.empty(), "optimizer.groups", "a group names no tensors");
    require(group.learning_rate_factor >= 0 && std::isfinite(group.learning_rate_factor),
            "optimizer.groups",
            fmt::format("learning_rate_factor {} is not finite and at least 0",
                        group.learning_rate_factor));
    const double decay = group.weight_decay.value_or(0);
    require(decay >= 0 && std::isfinite(decay), "optimizer.groups",
            fmt::format("weight_decay {} is not finite and at least 0", decay));
  }
  require(config.optimizer.clip_norm >= 0 && std::isfinite(config.optimizer.clip_norm),
          "optimizer.clip_norm",
          fmt::format("{} is not finite and at least 0", config.optimizer.clip_norm));
  const double room = config.optimizer.clip_epsilon;
  require(room >= 0 && room <= 1, "optimizer.clip_epsilon", fmt::format("{} is not in 0..1", room));
  const std::uint32_t lanes = config.optimizer.lanes.value_or(1);
  require(lanes >= 1 && lanes <= kOptimizerLanesMax, "optimizer.lanes",
          fmt::format("{} is not in 1..{}", lanes, kOptimizerLanesMax));
  require(config.optimizer.lazy_max >= 1, "optimizer.lazy_max", "must be at least 1");
  if (const auto found = contradiction_in(config)) require(false, found->key, found->why);
  validate_loss_scale(config.precision.loss_scale);
  const std::uint32_t micro_batches = config.activations.micro_batches;
  require(micro_batches >= 1 && micro_batches <= kMicroBatchesMax, "activations.micro_batches",
          fmt::format("{} is not in 1..{}", micro_batches, kMicroBatchesMax));
  require(config.threads <= kThreadsMax, "threads",
          fmt::format("{} is not in 0..{}", config.threads, kThreadsMax));
  validate_sharding(config.sharding);
  validate_storage(config.storage);
  validate_as_text(config);
}

}  // namespace sluice
