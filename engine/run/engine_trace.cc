#include "engine/run/engine_trace.h"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include "base/topology.h"

namespace sluice {
namespace {

using nlohmann::ordered_json;

// Equal neighbors as one [count, tier].
ordered_json runs_of(const std::vector<Tier>& tiers) {
  ordered_json runs = ordered_json::array();
  for (std::size_t i = 0; i < tiers.size();) {
    std::size_t end = i + 1;
    while (end < tiers.size() && tiers[end] == tiers[i]) ++end;
    runs.push_back({end - i, name_of(tiers[i])});
    i = end;
  }
  return runs;
}

ordered_json units_of(const Layout& layout) {
  ordered_json units = ordered_json::array();
  for (const UnitPlace& unit : layout.units()) {
    ordered_json tensors = ordered_json::array();
    for (const TensorPlace& tensor : layout.tensors_of(unit.id))
      tensors.push_back({{"name", tensor.name}, {"elements", tensor.element_count}});
    units.push_back({{"name", unit.name},
                     {"elements", unit.element_count},
                     {"first_block", unit.first_block},
                     {"blocks", unit.block_count},
                     {"frozen", unit.is_frozen},
                     {"parameter_bytes", layout.unit_parameter_bytes(unit.id)},
                     {"tensors", tensors}});
  }
  return units;
}

ordered_json config_json(const Config& config, const Placement& placement, std::uint32_t ranks) {
  return {{"parameters", static_cast<int>(config.precision.parameters)},
          {"gradients", static_cast<int>(config.precision.gradients)},
          {"optimizer", static_cast<int>(config.optimizer.kind)},
          {"clip_norm", config.optimizer.clip_norm},
          {"non_finite_stops", config.optimizer.non_finite == NonFinitePolicy::kStop},
          {"overlap", name_of(config.optimizer.overlap)},
          {"lanes", placement.lanes.count},
          {"device_bytes", placement.device_budget_bytes},
          {"host_bytes", placement.host_budget_bytes},
          {"parameter_placement", static_cast<int>(config.placement.parameters)},
          {"optimizer_placement", static_cast<int>(config.placement.optimizer)},
          {"gradient_placement", static_cast<int>(config.placement.gradients)},
          {"fills_device", placement.fills_device},
          {"ranks", ranks},
          {"sharding",
           {{"stage", config.sharding.stage},
            {"group", config.sharding.group_ranks},
            {"keep_gathered_bytes", config.sharding.keep_gathered_bytes}}},
          {"durable_state", config.storage.state.name},
          {"commit_every", config.storage.state.commit_every},
          {"paths", config.storage.paths},
          {"queue_depth", config.storage.queue_depth},
          {"verify", config.storage.verify == Verify::kFull     ? "full"
                     : config.storage.verify == Verify::kSample ? "sample"
                                                                : "off"},
          {"threads", config.threads},
          {"activations",
           {{"home", static_cast<int>(config.activations.home)},
            {"micro_batches", config.activations.micro_batches},
            {"order", static_cast<int>(config.activations.order)}}}};
}

ordered_json shard_json(const Shard& shard) {
  return {{"index", shard.index},
          {"count", shard.count},
          {"keeps_all_gradients", shard.keeps_all_gradients},
          {"keeps_all_parameters", shard.keeps_all_parameters},
          {"keep_gathered_bytes", shard.keep_gathered_bytes}};
}

ordered_json memory_json(const Placement& placement) {
  ordered_json pools = ordered_json::array();
  for (const Pool& pool : placement.pools()) {
    if (pool.size_bytes == 0) continue;
    pools.push_back({{"tier", name_of(pool.tier)},
                     {"name", pool.name},
                     {"bytes", pool.size_bytes},
                     {"reason", pool.reason}});
  }
  return {{"device_bytes", placement.device_bytes()},
          {"device_budget_bytes", placement.device_budget_bytes},
          {"host_bytes", placement.host_bytes()},
          {"host_budget_bytes", placement.host_budget_bytes},
          {"nvme_bytes", placement.nvme_bytes()},
          {"window_bytes", placement.window_bytes},
          {"lane_bytes", placement.lanes.slot_bytes},
          {"parameter_slots", placement.parameter_slots.count},
          {"parameter_slot_bytes", placement.parameter_slots.slot_bytes},
          {"gradient_slots", placement.gradient_slots.count},
          {"gradient_slot_bytes", placement.gradient_slots.slot_bytes},
          {"pools", pools}};
}

std::vector<std::uint32_t> indices_of(const std::vector<UnitId>& units) {
  std::vector<std::uint32_t> indices;
  for (const UnitId unit : units) indices.push_back(index_of(unit));
  return indices;
}

// A trace may come from anywhere. No run comes near these limits, and a plan made from a
// description within them is small.
constexpr std::uint64_t kElementsMax = std::uint64_t{1} << 48;  // for the model
constexpr std::uint64_t kBlocksMax = std::uint64_t{1} << 22;
constexpr std::uint64_t kBytesMax = std::uint64_t{1} << 56;
constexpr std::uint64_t kCountMax = std::uint64_t{1} << 24;

[[noreturn]] void fail_damaged(const std::string& why) {
  throw Error(ErrorCode::kInput, "the trace's description of the engine is damaged: " + why);
}

std::uint64_t number(const nlohmann::json& value, const std::string& name, std::uint64_t most) {
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > most)
    fail_damaged(fmt::format("{} is {}, but must be a whole number from 0 to {}", name,
                             value.is_structured() ? value.type_name() : value.dump(), most));
  return value.get<std::uint64_t>();
}

std::uint32_t count_in(const nlohmann::json& from, const char* key) {
  return static_cast<std::uint32_t>(number(from.at(key), key, kCountMax));
}

std::uint64_t bytes_in(const nlohmann::json& from, const char* key) {
  return number(from.at(key), key, kBytesMax);
}

// An enumeration by its number; `last` is the largest.
template <class Enum>
Enum choice_in(const nlohmann::json& from, const char* key, Enum last) {
  return static_cast<Enum>(number(from.at(key), key, static_cast<std::uint64_t>(last)));
}

std::vector<UnitId> order_from(const nlohmann::json& document, const char* key) {
  std::vector<UnitId> order;
  for (const nlohmann::json& index : document.at(key))
    order.push_back(UnitId{static_cast<std::uint32_t>(number(index, key, kCountMax))});
  if (order.empty()) fail_damaged(fmt::format("{} is empty", key));
  return order;
}

// Older traces lack this section; their state is taken to be that of one rank.
Config::Sharding sharding_from(const nlohmann::json& config) {
  Config::Sharding sharding;
  if (!config.contains("sharding")) return sharding;
  const nlohmann::json& from = config.at("sharding");
  sharding.stage = count_in(from, "stage");
  sharding.group_ranks = count_in(from, "group");
  sharding.keep_gathered_bytes = bytes_in(from, "keep_gathered_bytes");
  return sharding;
}

// Checks that the model has no more elements and blocks than possible.
void require_plausible(const ModelSpec& model, std::uint64_t block_elements) {
  std::uint64_t elements = 0, blocks = 0;
  for (const UnitSpec& unit : model.units) {
    std::uint64_t of_unit = 0;
    for (const TensorSpec& tensor : unit.tensors) of_unit += tensor.shape.front();
    elements += of_unit;
    blocks += of_unit / block_elements + 1;
    if (elements > kElementsMax || blocks > kBlocksMax)
      fail_damaged(
          fmt::format("up to unit \"{}\" the model has {} elements in {} blocks, more than the {} "
                      "in {} that any run has",
                      unit.name, elements, blocks, kElementsMax, kBlocksMax));
  }
}

template <class Function>
auto read_section(const std::string& text, const Function& function) {
  try {
    return function(nlohmann::json::parse(text));
  } catch (const nlohmann::json::exception& error) {
    fail_damaged(error.what());
  }
}

}  // namespace

std::string describe_engine(const Config& config, const ModelSpec& model, const Layout& layout,
                            const Placement& placement, std::uint32_t ranks) {
  const ordered_json document = {{"processor", topology().processor},
                                 {"granted_cores", topology().granted_cores},
                                 {"memory_bytes", topology().memory_bytes},
                                 {"parameters", layout.parameter_count()},
                                 {"state_bytes", layout.state_bytes()},
                                 {"block_elements", layout.block_elements()},
                                 {"config", config_json(config, placement, ranks)},
                                 {"memory", memory_json(placement)},
                                 {"forward_order", indices_of(model.forward_order)},
                                 {"backward_order", indices_of(model.backward_order)},
                                 {"concurrent_leases", model.concurrent_leases},
                                 {"boundary_bytes", model.boundary_bytes},
                                 {"shard", shard_json(layout.shard())},
                                 {"units", units_of(layout)},
                                 {"parameter_tier", runs_of(placement.parameter_tier)},
                                 {"record_tier", runs_of(placement.record_tier)}};
  // The application chooses tensor names: whatever bytes they have, the file is valid JSON.
  return document.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

std::string describe_counters(const IoCounters& counters) {
  const ordered_json document = {{"read_bytes", counters.read_bytes},
                                 {"read_requests", counters.read_requests},
                                 {"write_bytes", counters.write_bytes},
                                 {"write_requests", counters.write_requests},
                                 {"resumed", counters.resumed},
                                 {"retried", counters.retried},
                                 {"failed", counters.failed}};
  return document.dump();
}

Config config_of_trace(const std::string& engine_section) {
  return read_section(engine_section, [](const nlohmann::json& document) {
    const nlohmann::json& from = document.at("config");
    Config config;
    config.precision = {.parameters = choice_in(from, "parameters", DType::kFp16),
                        .gradients = choice_in(from, "gradients", DType::kFp16)};
    config.optimizer.kind = choice_in(from, "optimizer", OptimizerKind::kSgd);
    config.optimizer.clip_norm = from.at("clip_norm").get<double>();
    config.optimizer.non_finite =
        from.at("non_finite_stops").get<bool>() ? NonFinitePolicy::kStop : NonFinitePolicy::kSkip;
    for (const OverlapPolicy policy :
         {OverlapPolicy::kAuto, OverlapPolicy::kEager, OverlapPolicy::kDeferred,
          OverlapPolicy::kSpeculative, OverlapPolicy::kSerial}) {
      if (from.at("overlap") == name_of(policy)) config.optimizer.overlap = policy;
    }
    if (const std::uint32_t lanes = count_in(from, "lanes")) config.optimizer.lanes = lanes;
    config.memory = {.device_bytes = bytes_in(from, "device_bytes"),
                     .host_bytes = bytes_in(from, "host_bytes")};
    config.placement = {.parameters = choice_in(from, "parameter_placement", TierChoice::kNvme),
                        .optimizer = choice_in(from, "optimizer_placement", TierChoice::kNvme),
                        .gradients = choice_in(from, "gradient_placement", TierChoice::kNvme)};
    config.storage.paths = from.at("paths").get<std::vector<std::string>>();
    config.storage.block_elements = std::max(
        kAlignElements, number(document.at("block_elements"), "block_elements", kElementsMax));
    config.sharding = sharding_from(from);
    config.storage.state = {.name = from.value("durable_state", ""),
                            .commit_every = from.value("commit_every", 1u)};
    config.threads = count_in(from, "threads");
    const nlohmann::json& activations = from.at("activations");
    config.activations = {.home = choice_in(activations, "home", ActivationHome::kNvme),
                          .micro_batches = count_in(activations, "micro_batches"),
                          .order = choice_in(activations, "order", MicroBatchOrder::kVertical)};
    return config;
  });
}

RunMachine machine_of_trace(const std::string& engine_section) {
  return read_section(engine_section, [](const nlohmann::json& document) {
    const nlohmann::json& config = document.at("config");
    const std::uint32_t ranks = config.contains("ranks") ? count_in(config, "ranks") : 1;
    if (ranks == 0) fail_damaged("ranks is 0");
    return RunMachine{.ranks = ranks, .device_is_host = !config.value("fills_device", false)};
  });
}

Shard shard_of_trace(const std::string& engine_section) {
  return read_section(engine_section, [](const nlohmann::json& document) {
    const nlohmann::json& from = document.at("shard");
    const std::uint32_t count = count_in(from, "count");
    if (count == 0 || count_in(from, "index") >= count)
      fail_damaged(fmt::format("its shard has the index {} of {}", count_in(from, "index"), count));
    return Shard{.index = count_in(from, "index"),
                 .count = count,
                 .keeps_all_gradients = from.at("keeps_all_gradients").get<bool>(),
                 .keeps_all_parameters = from.at("keeps_all_parameters").get<bool>(),
                 .keep_gathered_bytes = bytes_in(from, "keep_gathered_bytes")};
  });
}

ModelSpec model_of_trace(const std::string& engine_section) {
  return read_section(engine_section, [](const nlohmann::json& document) {
    ModelSpec model;
    for (const nlohmann::json& from : document.at("units")) {
      UnitSpec unit;
      unit.name = from.at("name").get<std::string>();
      unit.is_frozen = from.at("frozen").get<bool>();
      for (const nlohmann::json& tensor : from.at("tensors"))
        unit.tensors.push_back(
            {.name = tensor.at("name").get<std::string>(),
             .shape = {number(tensor.at("elements"), "elements", kElementsMax)}});
      model.units.push_back(std::move(unit));
    }
    model.forward_order = order_from(document, "forward_order");
    model.backward_order = order_from(document, "backward_order");
    model.concurrent_leases = count_in(document, "concurrent_leases");
    for (const nlohmann::json& bytes : document.at("boundary_bytes"))
      model.boundary_bytes.push_back(number(bytes, "boundary_bytes", kBytesMax));
    require_plausible(model, std::max(kAlignElements, number(document.at("block_elements"),
                                                             "block_elements", kElementsMax)));
    return validated(std::move(model));
  });
}

}  // namespace sluice
