#include "tools/trace/trace_engine.h"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/untrusted_json.h"

namespace sluice {
namespace {

using nlohmann::json;

// By unit, from runs of [count, tier] over blocks.
std::vector<std::string> tiers_of(const json& runs, const std::vector<TracedUnit>& units) {
  std::vector<std::string> tiers;
  std::uint64_t block = 0;
  for (const json& run : runs) {
    const std::uint64_t end = block + run.at(0).get<std::uint64_t>();
    while (tiers.size() < units.size() && units[tiers.size()].first_block < end)
      tiers.push_back(run.at(1).get<std::string>());
    block = end;
  }
  tiers.resize(units.size());
  return tiers;
}

std::uint64_t blocks_in(const json& runs, const char* tier) {
  std::uint64_t blocks = 0;
  for (const json& run : runs)
    if (run.at(1) == tier) blocks += run.at(0).get<std::uint64_t>();
  return blocks;
}

std::uint64_t unused(std::uint64_t budget_bytes, std::uint64_t pool_bytes) {
  return budget_bytes > pool_bytes ? budget_bytes - pool_bytes : 0;
}

void read_units(const json& document, TracedEngine& engine) {
  for (const json& from : document.at("units")) {
    TracedUnit unit{.name = from.at("name"),
                    .first_block = from.at("first_block"),
                    .block_count = from.at("blocks"),
                    .parameter_bytes = from.at("parameter_bytes"),
                    .is_frozen = from.value("frozen", false),
                    .tensors = {}};
    for (const json& tensor : from.at("tensors")) unit.tensors.push_back(tensor.at("name"));
    engine.units.push_back(std::move(unit));
  }
  engine.parameter_tier = tiers_of(document.at("parameter_tier"), engine.units);
  engine.record_tier = tiers_of(document.at("record_tier"), engine.units);
  engine.record_blocks_on_storage = blocks_in(document.at("record_tier"), "nvme");
}

void read_memory(const json& memory, TracedEngine& engine) {
  engine.device_bytes = memory.at("device_bytes");
  engine.device_budget_bytes = memory.at("device_budget_bytes");
  engine.host_bytes = memory.at("host_bytes");
  engine.host_budget_bytes = memory.at("host_budget_bytes");
  engine.nvme_bytes = memory.at("nvme_bytes");
  engine.window_bytes = memory.value("window_bytes", std::uint64_t{0});
  engine.lane_bytes = memory.at("lane_bytes");
  engine.parameter_slots = memory.at("parameter_slots");
  engine.parameter_slot_bytes = memory.at("parameter_slot_bytes");
  engine.gradient_slots = memory.at("gradient_slots");
  engine.gradient_slot_bytes = memory.at("gradient_slot_bytes");
  for (const json& pool : memory.at("pools"))
    engine.pools.push_back(
        {.tier = pool.at("tier"), .name = pool.at("name"), .size_bytes = pool.at("bytes")});
}

void add_settings(const json& value, const std::string& key,
                  std::map<std::string, std::string>& settings) {
  if (!value.is_object()) {
    settings[key] = value.is_string() ? value.get<std::string>() : value.dump();
    return;
  }
  for (const auto& [name, member] : value.items())
    add_settings(member, key.empty() ? name : key + "." + name, settings);
}

// Where a trace is written changes nothing that it describes.
void read_settings(const json& document, TracedEngine& engine) {
  json config = document.at("config");
  if (config.contains("trace")) config.at("trace").erase("file");
  add_settings(config, "", engine.settings);
  engine.settings["processor"] = engine.processor;
  engine.settings["granted cores"] = std::to_string(engine.granted_cores);
  engine.settings["parameters"] = std::to_string(engine.parameters);
  engine.settings["bytes on the device"] = std::to_string(engine.device_bytes);
  engine.settings["bytes in host memory"] = std::to_string(engine.host_bytes);
  engine.settings["bytes on storage"] = std::to_string(engine.nvme_bytes);
}

}  // namespace

std::string TracedEngine::unit_name(std::uint32_t unit) const {
  if (unit == kTraceNone) return "-";
  return unit < units.size() ? units[unit].name : fmt::format("unit {}", unit);
}

std::uint64_t TracedEngine::unused_host_bytes() const {
  return unused(host_budget_bytes, host_bytes);
}

std::uint64_t TracedEngine::unused_device_bytes() const {
  return unused(device_budget_bytes, device_bytes);
}

std::string TracedEngine::setting(const std::string& key) const {
  const auto found = settings.find(key);
  return found == settings.end() ? std::string() : found->second;
}

std::uint64_t TracedEngine::all_unit_bytes() const {
  std::uint64_t all = 0;
  for (const TracedUnit& unit : units) all += unit.parameter_bytes;
  return all;
}

std::uint64_t TracedEngine::largest_unit_bytes() const {
  std::uint64_t largest = 0;
  for (const TracedUnit& unit : units) largest = std::max(largest, unit.parameter_bytes);
  return largest;
}

TracedEngine engine_of(const TraceFile& trace) {
  const auto section = trace.sections.find("engine");
  if (section == trace.sections.end()) return {};
  try {
    const json document = parse_untrusted_json<json>(section->second);
    TracedEngine engine;
    engine.processor = document.at("processor");
    engine.granted_cores = document.at("granted_cores");
    engine.parameters = document.at("parameters");
    engine.state_bytes = document.at("state_bytes");
    engine.own_parameters = document.value("own_parameters", engine.parameters);
    engine.state_bytes_per_parameter = document.value("state_bytes_per_parameter", 0.0);
    const json& config = document.at("config");
    engine.lanes = config.at("optimizer").value("lanes", 0u);
    engine.threads = config.at("run").at("threads");
    // Older traces have the words of the config alone.
    engine.storage_paths = document.value(
        "storage_folders", config.at("storage").value("paths", std::vector<std::string>()));
    engine.verify = config.at("storage").at("verify");
    engine.policy = config.at("optimizer").at("overlap");
    engine.queue_depth = config.at("storage").value("queue_depth", 0u);
    read_units(document, engine);
    read_memory(document.at("memory"), engine);
    for (const json& size_bytes : document.value("boundary_bytes", json::array()))
      engine.activation_bytes = std::max(engine.activation_bytes, size_bytes.get<std::uint64_t>());
    read_settings(document, engine);
    engine.is_known = true;
    return engine;
  } catch (const json::exception&) {
    return {};
  }
}

}  // namespace sluice
