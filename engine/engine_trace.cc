#include "engine/engine_trace.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/topology.h"

namespace sluice {
namespace {

using nlohmann::ordered_json;

// Equal neighbours as one [count, tier].
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

ordered_json config_json(const Config& config, const Placement& placement) {
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

std::vector<UnitId> order_from(const nlohmann::json& indices) {
  std::vector<UnitId> order;
  for (const nlohmann::json& index : indices) order.push_back(UnitId{index.get<std::uint32_t>()});
  return order;
}

template <class Function>
auto read_section(const std::string& text, const Function& function) {
  try {
    return function(nlohmann::json::parse(text));
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorCode::kInput,
                fmt::format("the trace's description of the engine is damaged: {}", error.what()));
  }
}

}  // namespace

std::string describe_engine(const Config& config, const ModelSpec& model, const Layout& layout,
                            const Placement& placement) {
  const ordered_json document = {{"processor", topology().processor},
                                 {"granted_cores", topology().granted_cores},
                                 {"memory_bytes", topology().memory_bytes},
                                 {"parameters", layout.parameter_count()},
                                 {"state_bytes", layout.state_bytes()},
                                 {"block_elements", layout.block_elements()},
                                 {"config", config_json(config, placement)},
                                 {"memory", memory_json(placement)},
                                 {"forward_order", indices_of(model.forward_order)},
                                 {"backward_order", indices_of(model.backward_order)},
                                 {"concurrent_leases", model.concurrent_leases},
                                 {"boundary_bytes", model.boundary_bytes},
                                 {"shard", shard_json(layout.shard())},
                                 {"units", units_of(layout)},
                                 {"parameter_tier", runs_of(placement.parameter_tier)},
                                 {"record_tier", runs_of(placement.record_tier)}};
  // Names of tensors are the application's: whatever bytes they have, the file is JSON.
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
    config.precision = {.parameters = static_cast<DType>(from.at("parameters").get<int>()),
                        .gradients = static_cast<DType>(from.at("gradients").get<int>())};
    config.optimizer.kind = static_cast<OptimizerKind>(from.at("optimizer").get<int>());
    config.optimizer.clip_norm = from.at("clip_norm").get<double>();
    config.optimizer.non_finite =
        from.at("non_finite_stops").get<bool>() ? NonFinitePolicy::kStop : NonFinitePolicy::kSkip;
    for (const OverlapPolicy policy :
         {OverlapPolicy::kAuto, OverlapPolicy::kEager, OverlapPolicy::kDeferred,
          OverlapPolicy::kSpeculative, OverlapPolicy::kSerial}) {
      if (from.at("overlap") == name_of(policy)) config.optimizer.overlap = policy;
    }
    if (const auto lanes = from.at("lanes").get<std::uint32_t>()) config.optimizer.lanes = lanes;
    config.memory = {.device_bytes = from.at("device_bytes").get<std::uint64_t>(),
                     .host_bytes = from.at("host_bytes").get<std::uint64_t>()};
    config.placement = {
        .parameters = static_cast<TierChoice>(from.at("parameter_placement").get<int>()),
        .optimizer = static_cast<TierChoice>(from.at("optimizer_placement").get<int>()),
        .gradients = static_cast<TierChoice>(from.at("gradient_placement").get<int>())};
    config.storage.paths = from.at("paths").get<std::vector<std::string>>();
    config.storage.block_elements = document.at("block_elements").get<std::uint64_t>();
    config.threads = from.at("threads").get<unsigned>();
    const nlohmann::json& activations = from.at("activations");
    config.activations = {
        .home = static_cast<ActivationHome>(activations.at("home").get<int>()),
        .micro_batches = activations.at("micro_batches").get<std::uint32_t>(),
        .order = static_cast<MicroBatchOrder>(activations.at("order").get<int>())};
    return config;
  });
}

bool fills_device_of_trace(const std::string& engine_section) {
  return read_section(engine_section, [](const nlohmann::json& document) {
    return document.at("config").value("fills_device", false);  // older traces have none
  });
}

Shard shard_of_trace(const std::string& engine_section) {
  return read_section(engine_section, [](const nlohmann::json& document) {
    const nlohmann::json& from = document.at("shard");
    return Shard{.index = from.at("index").get<std::uint32_t>(),
                 .count = from.at("count").get<std::uint32_t>(),
                 .keeps_all_gradients = from.at("keeps_all_gradients").get<bool>(),
                 .keeps_all_parameters = from.at("keeps_all_parameters").get<bool>(),
                 .keep_gathered_bytes = from.at("keep_gathered_bytes").get<std::uint64_t>()};
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
        unit.tensors.push_back({.name = tensor.at("name").get<std::string>(),
                                .shape = {tensor.at("elements").get<std::uint64_t>()}});
      model.units.push_back(std::move(unit));
    }
    model.forward_order = order_from(document.at("forward_order"));
    model.backward_order = order_from(document.at("backward_order"));
    model.concurrent_leases = document.at("concurrent_leases").get<std::uint32_t>();
    model.boundary_bytes = document.at("boundary_bytes").get<std::vector<std::uint64_t>>();
    return validated(std::move(model));
  });
}

}  // namespace sluice
