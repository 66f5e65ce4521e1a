#include "engine/store/durable_identity.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <iterator>
#include <set>
#include <span>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include "base/untrusted_json.h"
#include "engine/config/setting_change.h"
#include "engine/plan/sharding.h"
#include "engine/store/record_room.h"
#include "io/checksum.h"

namespace sluice {
namespace {

using nlohmann::json;

std::uint64_t hash_of(const std::string& text) {
  return checksum(std::as_bytes(std::span(text)));
}

json parsed(const std::string& settings) {
  json document = parse_untrusted_json<json>(settings);
  return document.is_object() ? document : json::object();
}

constexpr const char* kOptimizerKind = "optimizer.kind";
constexpr const char* kOptimizerState = "optimizer.state";
constexpr const char* kReduction = "sharding.reduction";
constexpr const char* kNodeRanks = "sharding.node_ranks";
constexpr const char* kLossScale = "precision.loss_scale";
constexpr const char* kUntouched = "optimizer.untouched";
constexpr const char* kClipEpsilon = "optimizer.clip_epsilon";
constexpr const char* kNonFinite = "optimizer.non_finite";
constexpr const char* kDecayed = "tensors with weight decay";
// Numbers that older versions did not write: a store of theirs does not say what they were.
constexpr std::array<std::string_view, 4> kUnwritten{kClipEpsilon, kNonFinite, kDecayed,
                                                     kReduction};

// A key that is not there has the value that older versions knew alone, and did not name.
std::string absent_value(std::string_view key) {
  if (key == kOptimizerState) return std::string(name_of(OptimizerState::kFp32));
  if (key == kReduction) return std::string(name_of(RankReduction::kExact));
  if (key == kUntouched) return std::string(name_of(UntouchedPolicy::kUpdate));
  return "nothing";
}

// "KEY was A and is B" for each key of either whose value differs.
std::vector<std::string> differences(const json& before,
                                     const std::map<std::string, std::string>& now) {
  std::map<std::string, std::string> was;
  if (before.is_object())
    for (const auto& [key, value] : before.items())
      if (value.is_string()) was[key] = value.get<std::string>();
  std::set<std::string> keys;
  for (const auto& [key, value] : was) keys.insert(key);
  for (const auto& [key, value] : now) keys.insert(key);
  const auto value_in = [](const std::map<std::string, std::string>& words,
                           const std::string& key) {
    const auto found = words.find(key);
    return found == words.end() ? absent_value(key) : found->second;
  };
  std::vector<std::string> all;
  for (const std::string& key : keys) {
    std::string before = value_in(was, key);
    const std::string after = value_in(now, key);
    if (before == after) continue;
    if (key.starts_with(kGroupKey)) {
      if (is_same_group(before, after)) continue;
      before = short_group(before, kGroupBytesMax);
    }
    std::ranges::move(setting_change(key, before, after), std::back_inserter(all));
  }
  return all;
}

json section(const json& settings, const char* key) {
  const auto found = settings.find(key);
  return found == settings.end() ? json::object() : *found;
}

constexpr const char* kUnits = "units";
// Every commit writes them again, twice.
constexpr std::size_t kUnitsBytesMax = std::size_t{512} << 10;

constexpr const char* kOpaque = "opaque";
constexpr const char* kLocal = "local";

// [[unit, is frozen, [[tensor, shape], ...]], ...]; an opaque unit has "opaque" for true, and a
// local one has "local" as well.
std::string text_of_units(const ModelSpec& model) {
  json units = json::array();
  for (const UnitSpec& unit : model.units) {
    json tensors = json::array();
    for (const TensorSpec& tensor : unit.tensors) tensors.push_back({tensor.name, tensor.shape});
    const json frozen = unit.is_opaque ? json(kOpaque) : json(unit.is_frozen);
    units.push_back({unit.name, frozen, std::move(tensors)});
    if (unit.is_local) units.back().push_back(kLocal);
  }
  std::string text = units.dump(-1, ' ', false, json::error_handler_t::replace);
  return text.size() <= kUnitsBytesMax ? text : std::string();
}

// Reads the settings, and names their defects.
class SettingsReader {
 public:
  SettingsReader(const std::string& settings, const std::string& store)
      : document_(parsed(settings)), store_(store) {}

  bool has(const char* part, const char* key) const {
    return section(document_, part).contains(key);
  }
  std::string text(const char* part, const char* key) const {
    const json from = section(document_, part);
    const auto found = from.find(key);
    if (found == from.end() || !found->is_string()) fail(part, key);
    return found->get<std::string>();
  }
  template <class Number>
  Number number(const char* part, const char* key) const {
    const std::string digits = text(part, key);
    Number value{};
    const char* const end = digits.data() + digits.size();
    const auto got = std::from_chars(digits.data(), end, value);
    if (got.ec != std::errc{} || got.ptr != end) fail(part, key);
    return value;
  }
  template <class Value, std::size_t kCount>
  Value one_of(const std::array<Value, kCount>& all, const char* part, const char* key) const {
    const std::string name = text(part, key);
    for (const Value value : all)
      if (name_of(value) == name) return value;
    fail(part, key);
  }
  ModelSpec model() const {
    if (!document_.contains(kUnits))
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("the store \"{}\" does not say which tensors it has: its model has "
                              "more than {} KiB of names, or an older version made it; continue "
                              "the run and save a checkpoint there (Engine::save, --checkpoint)",
                              store_, kUnitsBytesMax >> 10));
    ModelSpec model;
    try {
      for (const json& unit : document_[kUnits]) {
        UnitSpec& added = model.units.emplace_back();
        added.name = unit.at(0).get<std::string>();
        added.is_opaque = unit.at(1) == kOpaque;
        added.is_frozen = added.is_opaque || unit.at(1).get<bool>();
        added.is_local = added.is_announced = unit.size() > 3 && unit.at(3) == kLocal;
        for (const json& tensor : unit.at(2))
          added.tensors.push_back({.name = tensor.at(0).get<std::string>(),
                                   .shape = tensor.at(1).get<std::vector<std::uint64_t>>()});
      }
    } catch (const json::exception&) {
      fail("settings", kUnits);
    }
    return validated(std::move(model));
  }
  [[noreturn]] void fail(const char* part, const char* key) const {
    throw Error(ErrorCode::kDamaged,
                fmt::format("the store \"{}\": its record's field \"{}.{}\" is missing or makes no "
                            "sense",
                            store_, part, key));
  }

 private:
  json document_;
  const std::string& store_;
};

}  // namespace

DurableIdentity::DurableIdentity(const Config& config, const ModelSpec& model, const Layout& layout,
                                 std::uint32_t ranks) {
  std::string names;
  std::size_t tensors = 0;
  std::string frozen, local;
  for (const UnitSpec& unit : model.units) {
    if (unit.is_local) local += fmt::format("{}\n", unit.name);
    names += fmt::format("{}\n", unit.name);
    if (unit.is_frozen)
      frozen += fmt::format("{}{}\n", unit.name, unit.is_opaque ? " (opaque)" : "");
    for (const TensorSpec& tensor : unit.tensors)
      names += fmt::format("{} {}\n", tensor.name, fmt::join(tensor.shape, "x"));
    tensors += unit.tensors.size();
  }
  model_hash_ = hash_of(names);
  units_ = text_of_units(model);
  model_ = {{"units", fmt::format("{}", model.units.size())},
            {"tensors", fmt::format("{}", tensors)},
            {"parameters", fmt::format("{}", layout.parameter_count())},
            {"names and shapes", fmt::format("of hash {:016x}", model_hash_)}};
  layout_ = {{"precision.parameters", std::string(name_of(config.precision.parameters))},
             {kOptimizerKind, std::string(name_of(config.optimizer.kind))},
             {kOptimizerState, std::string(name_of(config.optimizer.state))},
             {"storage.block_elements", fmt::format("{}", layout.block_elements())},
             {"ranks", fmt::format("{}", ranks)},
             {"frozen units", fmt::format("of hash {:016x}", hash_of(frozen))}};
  if (ranks > 1) {
    layout_["sharding.stage"] = fmt::format("{}", config.sharding.stage);
    layout_["sharding.group_ranks"] = fmt::format("{}", config.sharding.group_ranks);
  }
  if (!local.empty()) layout_["local units"] = fmt::format("of hash {:016x}", hash_of(local));
  // With nodes the sums are others, and at stage 0 the blocks have another padding.
  const bool has_nodes = config.sharding.reduction == RankReduction::kNodes &&
                         first_level_ranks(config.sharding, ranks) > 1;
  if (has_nodes) {
    layout_[kReduction] = name_of(config.sharding.reduction);
    layout_[kNodeRanks] = fmt::format("{}", config.sharding.node_ranks);
  }
  describe_config(config, model);
  if (ranks > 1 && !has_nodes)
    config_[kReduction] =
        name_of(config.sharding.reduction == RankReduction::kNccl ? RankReduction::kNccl
                                                                  : RankReduction::kExact);
  // Without the default, so that the hash is the one of older versions.
  Words hashed = layout_;
  if (config.optimizer.state == OptimizerState::kFp32) hashed.erase(kOptimizerState);
  layout_hash_ = hash_of(json(hashed).dump());
  config_hash_ = hash_of(json(config_).dump());
  require_room();
}

void DurableIdentity::describe_config(const Config& config, const ModelSpec& model) {
  const LossScaleOptions& scale = config.precision.loss_scale;
  config_ = {{"precision.gradients", std::string(name_of(config.precision.gradients))},
             // The first of a scale that moves is 0, and not -0.
             {kLossScale, fmt::format("{} {} {} {} {} {}", scale.static_scale + 0.0,
                                      scale.initial_scale_power, scale.window, scale.hysteresis,
                                      scale.consecutive_hysteresis, scale.minimum)},
             {"optimizer.beta1", fmt::format("{}", config.optimizer.adam.beta1)},
             {"optimizer.beta2", fmt::format("{}", config.optimizer.adam.beta2)},
             {"optimizer.epsilon", fmt::format("{}", config.optimizer.adam.epsilon)},
             {"optimizer.weight_decay", fmt::format("{}", config.optimizer.adam.weight_decay)},
             {"optimizer.momentum", fmt::format("{}", config.optimizer.momentum)},
             {"optimizer.clip_norm", fmt::format("{}", config.optimizer.clip_norm)}};
  if (config.optimizer.state == OptimizerState::kBf16)
    config_["optimizer.rounding_seed"] = fmt::format("{}", config.optimizer.rounding_seed);
  if (config.optimizer.untouched == UntouchedPolicy::kSkip)  // the others have the same bits
    config_[kUntouched] = std::string(name_of(config.optimizer.untouched));
  config_[kClipEpsilon] =
      fmt::format("{}", config.optimizer.clip_norm == 0 ? 0.0 : config.optimizer.clip_epsilon);
  // A scale that moves skips steps whatever the config says.
  config_[kNonFinite] = name_of(config.precision.scale_moves() ? NonFinitePolicy::kSkip
                                                               : config.optimizer.non_finite);
  std::string decayed;
  std::size_t decayed_count = 0;
  for (const UnitSpec& unit : model.units) {
    for (const TensorSpec& tensor : unit.tensors) {
      const bool decays =
          config.optimizer.adam.weight_decay != 0 && tensor.weight_decay == WeightDecay::kApply;
      if (unit.is_frozen || !decays) continue;
      decayed += fmt::format("{}\n", tensor.name);
      ++decayed_count;
    }
  }
  config_[kDecayed] = fmt::format("{} of hash {:016x}", decayed_count, hash_of(decayed));
  config_.merge(words_of_groups(config.optimizer.groups));
}

// The store's model and config are refused here, before anything is made.
void DurableIdentity::require_room() const {
  const std::size_t bytes = settings_of(json::array(), false).size();
  if (bytes <= kSettingsBytesMax) return;
  throw Error(
      ErrorCode::kUnsupported,
      fmt::format("a durable store's records have room for {} KiB of settings, but those of "
                  "this config take {} KiB, for it has {} optimizer.groups; merge groups "
                  "that have equal numbers, or leave storage.state out of the config and "
                  "save checkpoints",
                  kSettingsBytesMax >> 10, (bytes + 1023) >> 10,
                  std::ranges::count_if(config_, [](const auto& entry) {
                    return entry.first.starts_with(kGroupKey);
                  })));
}

std::string DurableIdentity::settings_of(const json& changes, bool has_units) const {
  json document{{"model", model_}, {"layout", layout_}, {"config", config_}, {"changes", changes}};
  if (has_units && !units_.empty()) document[kUnits] = json::parse(units_);
  return document.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string DurableIdentity::settings(const std::string& changes) const {
  json list = json::parse(changes);
  std::string text = settings_of(list, true);
  if (text.size() > kSettingsBytesMax) text = settings_of(list, false);
  if (text.size() <= kSettingsBytesMax) return text;
  const std::size_t others = settings_of(json::array(), false).size();
  shorten_changes(list, kSettingsBytesMax - others);
  text = settings_of(list, false);
  return text.size() <= kSettingsBytesMax ? text : settings_of(json::array(), false);
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

bool DurableIdentity::can_take_over(const std::string& settings) const {
  const json saved = parsed(settings);
  const json layout = section(saved, "layout");
  return section(saved, "model") == json(model_) && layout.is_object() &&
         layout.value(kOptimizerKind, std::string()) == layout_.at(kOptimizerKind);
}

std::vector<std::string> DurableIdentity::changes(const std::string& settings) const {
  const json saved = section(parsed(settings), "config");
  Words now = config_;
  for (const std::string_view key : kUnwritten)
    if (!saved.contains(key)) now.erase(std::string(key));
  return differences(saved, now);
}

std::string DurableIdentity::accepted_changes(const std::string& settings,
                                              std::uint64_t step) const {
  json list = section(parsed(settings), "changes");
  if (!list.is_array()) list = json::array();
  for (const std::string& change : changes(settings))
    list.push_back({{"step", step}, {"change", change}});
  shorten_changes(list, kChangesBytesMax);
  return list.dump(-1, ' ', false, json::error_handler_t::replace);
}

DescribedRun described_run(const std::string& settings, const std::string& store) {
  const SettingsReader reader(settings, store);
  DescribedRun run{.model = reader.model(), .config = {}};
  constexpr std::array kTypes{DType::kFp32, DType::kBf16, DType::kFp16};
  constexpr std::array kOptimizers{OptimizerKind::kAdamW, OptimizerKind::kAdam,
                                   OptimizerKind::kLion, OptimizerKind::kAdagrad,
                                   OptimizerKind::kSgd};
  Config& config = run.config;
  config.precision.parameters = reader.one_of(kTypes, "layout", "precision.parameters");
  config.precision.gradients = reader.one_of(kTypes, "config", "precision.gradients");
  config.optimizer.kind = reader.one_of(kOptimizers, "layout", kOptimizerKind);
  constexpr std::array kStates{OptimizerState::kFp32, OptimizerState::kBf16, OptimizerState::k8bit};
  if (reader.has("layout", kOptimizerState))
    config.optimizer.state = reader.one_of(kStates, "layout", kOptimizerState);
  if (config.optimizer.state == OptimizerState::kBf16)
    config.optimizer.rounding_seed =
        reader.number<std::uint64_t>("config", "optimizer.rounding_seed");
  if (reader.has("config", kUntouched))
    config.optimizer.untouched = reader.one_of(
        std::array{UntouchedPolicy::kUpdate, UntouchedPolicy::kSkip}, "config", kUntouched);
  AdamOptions& adam = config.optimizer.adam;
  adam.beta1 = reader.number<double>("config", "optimizer.beta1");
  adam.beta2 = reader.number<double>("config", "optimizer.beta2");
  adam.epsilon = reader.number<double>("config", "optimizer.epsilon");
  adam.weight_decay = reader.number<double>("config", "optimizer.weight_decay");
  config.optimizer.momentum = reader.number<double>("config", "optimizer.momentum");
  config.optimizer.clip_norm = reader.number<double>("config", "optimizer.clip_norm");
  config.storage.block_elements = reader.number<std::uint64_t>("layout", "storage.block_elements");
  run.ranks = reader.number<std::uint32_t>("layout", "ranks");
  if (run.ranks > 1) {
    config.sharding.stage = reader.number<std::uint32_t>("layout", "sharding.stage");
    config.sharding.group_ranks = reader.number<std::uint32_t>("layout", "sharding.group_ranks");
  }
  constexpr std::array kReductions{RankReduction::kNodes};
  if (reader.has("layout", kReduction)) {
    config.sharding.reduction = reader.one_of(kReductions, "layout", kReduction);
    config.sharding.node_ranks = reader.number<std::uint32_t>("layout", kNodeRanks);
  }
  return run;
}

std::optional<LossScaleState> moving_scale(const CommitRecord& record) {
  const json config = section(parsed(record.settings), "config");
  const auto found = config.find(kLossScale);
  const std::string rule = found != config.end() && found->is_string() ? *found : "";
  if (!rule.starts_with("0 ")) return std::nullopt;  // the static scale comes first
  return LossScaleState{.scale = record.scale.scale,
                        .hysteresis_left = record.scale.hysteresis_left,
                        .good_steps = static_cast<std::uint32_t>(record.scale.good_steps)};
}

std::string short_settings(const std::string& settings) {
  json document = parse_untrusted_json<json>(settings);
  if (!document.is_object()) return settings;
  document.erase(kUnits);
  return document.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace sluice
