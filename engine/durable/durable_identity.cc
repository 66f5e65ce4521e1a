#include "engine/durable/durable_identity.h"

#include <span>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include "io/checksum.h"

namespace sluice {
namespace {

using nlohmann::json;

std::uint64_t hash_of(const std::string& text) {
  return checksum(std::as_bytes(std::span(text)));
}

json parsed(const std::string& settings) {
  json document = json::parse(settings, nullptr, /*allow_exceptions=*/false);
  return document.is_object() ? document : json::object();
}

std::string text_in(const json& from, const std::string& key) {
  const auto found = from.find(key);
  return found != from.end() && found->is_string() ? found->get<std::string>() : "nothing";
}

// "KEY was A and is B" for each key whose value differs.
std::vector<std::string> differences(const json& before,
                                     const std::map<std::string, std::string>& now) {
  std::vector<std::string> all;
  for (const auto& [key, value] : now) {
    const std::string was = before.is_object() ? text_in(before, key) : "nothing";
    if (was != value) all.push_back(fmt::format("{} was {} and is {}", key, was, value));
  }
  return all;
}

json section(const json& settings, const char* key) {
  const auto found = settings.find(key);
  return found == settings.end() ? json::object() : *found;
}

}  // namespace

DurableIdentity::DurableIdentity(const Config& config, const ModelSpec& model, const Layout& layout,
                                 std::uint32_t ranks) {
  std::string names;
  std::size_t tensors = 0;
  std::string frozen;
  for (const UnitSpec& unit : model.units) {
    names += fmt::format("{}\n", unit.name);
    if (unit.is_frozen) frozen += fmt::format("{}\n", unit.name);
    for (const TensorSpec& tensor : unit.tensors)
      names += fmt::format("{} {}\n", tensor.name, fmt::join(tensor.shape, "x"));
    tensors += unit.tensors.size();
  }
  model_hash_ = hash_of(names);
  model_ = {{"units", fmt::format("{}", model.units.size())},
            {"tensors", fmt::format("{}", tensors)},
            {"parameters", fmt::format("{}", layout.parameter_count())},
            {"names and shapes", fmt::format("of hash {:016x}", model_hash_)}};
  layout_ = {{"precision.parameters", std::string(name_of(config.precision.parameters))},
             {"optimizer.kind", std::string(name_of(config.optimizer.kind))},
             {"storage.block_elements", fmt::format("{}", layout.block_elements())},
             {"ranks", fmt::format("{}", ranks)},
             {"frozen units", fmt::format("of hash {:016x}", hash_of(frozen))}};
  if (ranks > 1) {
    layout_["sharding.stage"] = fmt::format("{}", config.sharding.stage);
    layout_["sharding.group_ranks"] = fmt::format("{}", config.sharding.group_ranks);
  }
  const LossScaleOptions& scale = config.precision.loss_scale;
  config_ = {
      {"precision.gradients", std::string(name_of(config.precision.gradients))},
      {"precision.loss_scale",
       fmt::format("{} {} {} {} {} {}", scale.static_scale, scale.initial_scale_power, scale.window,
                   scale.hysteresis, scale.consecutive_hysteresis, scale.minimum)},
      {"optimizer.beta1", fmt::format("{}", config.optimizer.adam.beta1)},
      {"optimizer.beta2", fmt::format("{}", config.optimizer.adam.beta2)},
      {"optimizer.epsilon", fmt::format("{}", config.optimizer.adam.epsilon)},
      {"optimizer.weight_decay", fmt::format("{}", config.optimizer.adam.weight_decay)},
      {"optimizer.momentum", fmt::format("{}", config.optimizer.momentum)},
      {"optimizer.clip_norm", fmt::format("{}", config.optimizer.clip_norm)}};
  for (std::size_t i = 0; i < config.optimizer.groups.size(); ++i) {
    const Config::Optimizer::Group& group = config.optimizer.groups[i];
    config_[fmt::format("optimizer.groups[{}]", i)] =
        fmt::format("{} {} {}", fmt::join(group.tensors, " "), group.learning_rate_factor,
                    group.weight_decay.value_or(-1));
  }
  layout_hash_ = hash_of(json(layout_).dump());
  config_hash_ = hash_of(json(config_).dump());
}

std::string DurableIdentity::settings(const std::string& changes) const {
  return json{{"model", model_},
              {"layout", layout_},
              {"config", config_},
              {"changes", json::parse(changes)}}
      .dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string DurableIdentity::obstacle(std::uint64_t model_hash, std::uint64_t layout_hash,
                                      const std::string& settings) const {
  const json saved = parsed(settings);
  if (model_hash != model_hash_)
    return fmt::format("it holds another model: {}",
                       fmt::join(differences(section(saved, "model"), model_), "; "));
  if (layout_hash != layout_hash_)
    return fmt::format("it was made with other settings: {}",
                       fmt::join(differences(section(saved, "layout"), layout_), "; "));
  return {};
}

std::vector<std::string> DurableIdentity::changes(const std::string& settings) const {
  return differences(section(parsed(settings), "config"), config_);
}

std::string DurableIdentity::accepted_changes(const std::string& settings,
                                              std::uint64_t step) const {
  json list = section(parsed(settings), "changes");
  if (!list.is_array()) list = json::array();
  for (const std::string& change : changes(settings))
    list.push_back({{"step", step}, {"change", change}});
  return list.dump();
}

}  // namespace sluice
