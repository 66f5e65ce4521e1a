#include "engine/config/config_text.h"

#include <algorithm>
#include <cstdint>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace sluice {
namespace {

using nlohmann::ordered_json;

// The largest size that a file may have. Programs also set larger ones, for no limit.
constexpr std::uint64_t kSizeMax = INT64_MAX;

std::string bytes_text(std::uint64_t size_bytes) {
  return fmt::format("{}", std::min(size_bytes, kSizeMax));
}

std::string budget_text(const std::optional<std::uint64_t>& size_bytes) {
  return size_bytes ? bytes_text(*size_bytes) : "auto";
}

ordered_json precision_json(const Config::Precision& precision) {
  const LossScaleOptions& scale = precision.loss_scale;
  return {{"parameters", name_of(precision.parameters)},
          {"gradients", name_of(precision.gradients)},
          {"loss_scale",
           {{"static", scale.static_scale},
            {"initial_power", scale.initial_scale_power},
            {"window", scale.window},
            {"hysteresis", scale.hysteresis},
            {"consecutive_hysteresis", scale.consecutive_hysteresis},
            {"minimum", scale.minimum}}}};
}

ordered_json optimizer_json(const Config::Optimizer& optimizer) {
  ordered_json groups = ordered_json::array();
  for (const Config::Optimizer::Group& group : optimizer.groups) {
    groups.push_back(
        {{"tensors", group.tensors}, {"learning_rate_factor", group.learning_rate_factor}});
    if (group.weight_decay) groups.back()["weight_decay"] = *group.weight_decay;
  }
  ordered_json json = {{"type", name_of(optimizer.kind)},
                       {"state", name_of(optimizer.state)},
                       {"rounding_seed", optimizer.rounding_seed},
                       {"beta1", optimizer.adam.beta1},
                       {"beta2", optimizer.adam.beta2},
                       {"epsilon", optimizer.adam.epsilon},
                       {"momentum", optimizer.momentum},
                       {"weight_decay", optimizer.adam.weight_decay},
                       {"groups", groups},
                       {"clip_norm", optimizer.clip_norm},
                       {"clip_epsilon", optimizer.clip_epsilon},
                       {"non_finite", name_of(optimizer.non_finite)},
                       {"untouched", name_of(optimizer.untouched)},
                       {"lazy_max", optimizer.lazy_max},
                       {"overlap", name_of(optimizer.overlap)},
                       {"update_on", name_of(optimizer.update_on)}};
  if (optimizer.lanes) json["lanes"] = *optimizer.lanes;
  return json;
}

ordered_json storage_json(const Config::Storage& storage) {
  ordered_json json = {
      {"paths", storage.paths},
      {"weights", storage.weights},
      {"calibration", storage.calibration},
      {"backend", name_of(storage.backend)},
      {"queue_depth", storage.queue_depth},
      {"verify", name_of(storage.verify)},
      {"state", {{"name", storage.state.name}, {"commit_every", storage.state.commit_every}}},
      {"timeout", storage.timeout_s}};
  if (storage.block_elements) json["block_elements"] = *storage.block_elements;
  return json;
}

ordered_json sharding_json(const Config::Sharding& sharding) {
  ordered_json json = {{"stage", sharding.stage},
                       {"group", "world"},
                       {"keep_gathered", bytes_text(sharding.keep_gathered_bytes)},
                       {"reduction", name_of(sharding.reduction)},
                       {"node_ranks", sharding.node_ranks},
                       {"timeout", sharding.timeout_s}};
  if (sharding.group_is_node) json["group"] = "node";
  if (sharding.group_ranks != 0) json["group"] = sharding.group_ranks;
  return json;
}

}  // namespace

std::string config_text(const Config& config) {
  ordered_json json = {{"precision", precision_json(config.precision)},
                       {"optimizer", optimizer_json(config.optimizer)},
                       {"memory",
                        {{"device", budget_text(config.memory.device_bytes)},
                         {"host", budget_text(config.memory.host_bytes)},
                         {"check", name_of(config.memory.check)},
                         {"save_buffers", config.memory.save_buffers},
                         {"unified", name_of(config.memory.unified)},
                         {"guard", name_of(config.memory.guard)}}},
                       {"placement",
                        {{"parameters", name_of(config.placement.parameters)},
                         {"optimizer", name_of(config.placement.optimizer)},
                         {"gradients", name_of(config.placement.gradients)}}},
                       {"activations", name_of(config.activations.home)},
                       {"storage", storage_json(config.storage)},
                       {"sharding", sharding_json(config.sharding)}};
  if (config.threads != 0) json["run"] = {{"threads", config.threads}};
  // Paths and tensors have whatever bytes they have; the text is JSON.
  return json.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

}  // namespace sluice
