// The description of the engine that wrote a trace: units, budgets, placement. The description
// comes from the trace's section "engine", and is empty if the trace has no such section. The
// structs are plain data.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tools/trace/trace_reader.h"

namespace sluice {

struct TracedUnit {
  std::string name;
  std::uint32_t first_block = 0;
  std::uint32_t block_count = 0;
  std::uint64_t parameter_bytes = 0;
  bool is_frozen = false;
  std::vector<std::string> tensors;
};

struct TracedPool {
  std::string tier;
  std::string name;
  std::uint64_t size_bytes = 0;
};

struct TracedEngine {
  bool is_known = false;
  std::string processor;
  std::uint64_t granted_cores = 0;
  std::uint64_t parameters = 0;
  std::uint64_t state_bytes = 0;
  std::vector<TracedUnit> units;
  std::vector<TracedPool> pools;
  std::vector<std::string> parameter_tier;  // for each unit, the tier of its first block
  std::vector<std::string> record_tier;
  std::uint64_t device_bytes = 0, device_budget_bytes = 0;
  // The trained parameters that this rank updates, and the state that an update of one of them
  // reads and writes. 0 in traces of older versions.
  std::uint64_t own_parameters = 0;
  double state_bytes_per_parameter = 0;
  std::uint64_t host_bytes = 0, host_budget_bytes = 0;
  std::uint64_t nvme_bytes = 0;
  std::uint64_t window_bytes = 0;      // on the device, of units in use or read ahead; 0 = unknown
  std::uint64_t activation_bytes = 0;  // of the largest that the engine keeps; 0 = unknown
  std::uint64_t record_blocks_on_storage = 0;
  std::uint32_t lanes = 0;
  std::uint64_t lane_bytes = 0;
  std::uint32_t parameter_slots = 0;
  std::uint64_t parameter_slot_bytes = 0;
  std::uint32_t gradient_slots = 0;
  std::uint64_t gradient_slot_bytes = 0;
  unsigned threads = 0;
  std::vector<std::string> storage_paths;  // one path per drive
  std::string verify;
  std::string policy;
  std::uint32_t queue_depth = 0;  // of each drive
  // This map contains every key of the config, and facts about the run, such as the processor. The
  // budgets and the number of lanes are the values in the plan.
  std::map<std::string, std::string> settings;

  // Returns the unit's name, or its number if the name is unknown.
  std::string unit_name(std::uint32_t unit) const;
  // Returns the part of the budget that no pool takes; 0 if the budget is unknown.
  std::uint64_t unused_host_bytes() const;
  std::uint64_t unused_device_bytes() const;
  // Returns the text of settings[`key`], or no text if the trace has no such key.
  std::string setting(const std::string& key) const;
  std::uint64_t all_unit_bytes() const;
  std::uint64_t largest_unit_bytes() const;
};

// Returns the description of the engine that wrote `trace`. A damaged section counts as a missing
// section.
TracedEngine engine_of(const TraceFile& trace);

}  // namespace sluice
