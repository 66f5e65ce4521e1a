#include "engine/run/engine_trace.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/config_document.h>
#include <sluice/error.h>
#include "base/topology.h"
#include "base/untrusted_json.h"
#include "engine/config/config_text.h"

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
                     {"announced", unit.is_announced},
                     {"pinned", unit.is_pinned},
                     {"local", unit.is_local},
                     {"parameter_bytes", layout.unit_parameter_bytes(unit.id)},
                     {"tensors", tensors}});
  }
  return units;
}

ordered_json shard_json(const Shard& shard) {
  return {{"index", shard.index},
          {"count", shard.count},
          {"keeps_all_gradients", shard.keeps_all_gradients},
          {"keeps_all_parameters", shard.keeps_all_parameters},
          {"keep_gathered_bytes", shard.keep_gathered_bytes},
          {"pieces", shard.pieces}};
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

// The folders' one names, as calibrations have them. The config may have others, such as relative
// ones.
std::vector<std::string> folders_of(const std::vector<std::string>& paths) {
  std::vector<std::string> folders;
  for (const std::string& path : paths) {
    std::error_code failure;
    const std::filesystem::path folder = std::filesystem::canonical(path, failure);
    folders.push_back(failure ? path : folder.string());
  }
  return folders;
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

// With the budgets and lanes that the plan has come to.
ordered_json config_json(Config config, const Placement& placement) {
  config.memory.device_bytes = std::min(placement.device_budget_bytes, kBytesMax);
  config.memory.host_bytes = std::min(placement.host_budget_bytes, kBytesMax);
  if (placement.lanes.count != 0) config.optimizer.lanes = placement.lanes.count;
  return ordered_json::parse(config_text(config));
}

// The trained parameters that this rank updates.
std::uint64_t own_parameters(const Layout& layout) {
  std::uint64_t count = 0;
  for (const BlockPlace& block : layout.blocks())
    if (!layout.is_frozen(block.id)) count += block.element_count;
  return count;
}

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

std::vector<UnitId> order_from(const nlohmann::json& document, const char* key) {
  std::vector<UnitId> order;
  for (const nlohmann::json& index : document.at(key))
    order.push_back(UnitId{static_cast<std::uint32_t>(number(index, key, kCountMax))});
  if (order.empty()) fail_damaged(fmt::format("{} is empty", key));
  return order;
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
    const auto document = parse_untrusted_json<nlohmann::json>(text);
    if (document.is_discarded()) fail_damaged("it is no JSON, or is nested too deeply");
    return function(document);
  } catch (const nlohmann::json::exception& error) {
    fail_damaged(error.what());
  }
}

}  // namespace

std::string describe_engine(const Config& config, const ModelSpec& model, const Layout& layout,
                            const Placement& placement, std::uint32_t ranks,
                            unsigned granted_cores) {
  const ordered_json document = {
      {"processor", topology().processor},
      {"granted_cores", granted_cores},
      {"memory_bytes", topology().memory_bytes},
      {"parameters", layout.parameter_count()},
      {"state_bytes", layout.state_bytes()},
      {"own_parameters", own_parameters(layout)},
      {"state_bytes_per_parameter", layout.format().state_bytes_per_element()},
      {"block_elements", layout.block_elements()},
      {"config", config_json(config, placement)},
      {"storage_folders", folders_of(config.storage.paths)},
      {"lanes_planned", !config.optimizer.lanes.has_value()},
      {"ranks", ranks},
      {"device_is_host", !placement.fills_device},
      {"micro_batches", config.activations.micro_batches},
      {"order", name_of(config.activations.order)},
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
    Config config;
    try {
      config = engine_config(ConfigDocument(document.at("config").dump(), "config"));
    } catch (const Error& error) {
      fail_damaged(error.what());
    }
    for (const auto& budget_bytes : {config.memory.device_bytes, config.memory.host_bytes}) {
      if (!budget_bytes || *budget_bytes > kBytesMax)
        fail_damaged("a memory budget of its config is none that a run has");
    }
    config.storage.block_elements = std::max(
        kAlignElements, number(document.at("block_elements"), "block_elements", kElementsMax));
    config.activations.micro_batches = count_in(document, "micro_batches");
    if (document.at("order") == name_of(MicroBatchOrder::kVertical))
      config.activations.order = MicroBatchOrder::kVertical;
    return config;
  });
}

bool lanes_of_trace_are_planned(const std::string& engine_section) {
  return read_section(engine_section, [](const nlohmann::json& document) {
    return document.value("lanes_planned", false);
  });
}

RunMachine machine_of_trace(const std::string& engine_section) {
  return read_section(engine_section, [](const nlohmann::json& document) {
    const std::uint32_t ranks = count_in(document, "ranks");
    if (ranks == 0) fail_damaged("ranks is 0");
    return RunMachine{.ranks = ranks, .device_is_host = document.at("device_is_host").get<bool>()};
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
                 .keep_gathered_bytes = bytes_in(from, "keep_gathered_bytes"),
                 .pieces = from.contains("pieces") ? count_in(from, "pieces") : 1};
  });
}

ModelSpec model_of_trace(const std::string& engine_section) {
  return read_section(engine_section, [](const nlohmann::json& document) {
    ModelSpec model;
    for (const nlohmann::json& from : document.at("units")) {
      UnitSpec unit;
      unit.name = from.at("name").get<std::string>();
      unit.is_frozen = from.at("frozen").get<bool>();
      unit.is_announced = from.value("announced", false);
      unit.is_pinned = from.value("pinned", false);
      unit.is_local = from.value("local", false);
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
