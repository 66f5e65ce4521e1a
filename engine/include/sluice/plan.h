// The plan of a run, as the engine itself makes it: the memory that the run takes in each tier, and
// the bytes that a step moves. No engine, device or file is needed, so a laptop can plan for a
// cluster.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <sluice/config.h>
#include <sluice/memory_marks.h>
#include <sluice/model_spec.h>
#include <sluice/step_report.h>

namespace sluice {

// The part of the machine that a plan depends on.
struct RunMachine {
  std::uint32_t ranks = 1;     // training together
  bool device_is_host = true;  // otherwise the device has its own memory, a GPU's
  // Where the config names no budgets, memory.device is all of `device_bytes`, and memory.host is
  // half of `host_memory_bytes`, which is a rank's part where several share a host. A GPU of
  // unknown size is taken to be large enough for any plan.
  std::uint64_t device_bytes = std::uint64_t{1} << 62;
  std::uint64_t host_memory_bytes = 0;
  // The free bytes of the file system of a path. Empty: every path has room.
  std::function<std::uint64_t(const std::string& path)> free_bytes = {};
};

// One buffer, or several of one kind, that the engine makes at its start.
struct Pool {
  Tier tier = Tier::kHost;
  std::string name;
  std::uint64_t size_bytes = 0;
  std::string reason;
};

struct Plan {
  std::vector<Pool> pools;
  // The sums of the pools by tier; and the budgets that hold them.
  std::uint64_t device_bytes = 0;
  std::uint64_t host_bytes = 0;
  std::uint64_t nvme_bytes = 0;
  std::uint64_t device_budget_bytes = 0;
  std::uint64_t host_budget_bytes = 0;
  // When blocks are updated. For the config's "auto": while clipping is rare.
  OverlapPolicy policy{};
  // The traffic of a step of Config::Activations::micro_batches, in their order.
  Traffic traffic;
};

// The machine that this runs on, with the host as the device: its drives, and the size of its
// memory, or less where the default budgets would not fit into the free memory. The device is as
// large as host_device_bytes(config).
RunMachine this_machine(const Config& config);

// The memory of a host device (sluice/host_device.h): memory.device; if the config names none, a
// quarter of the machine's memory, but at most half of the free memory.
std::uint64_t host_device_bytes(const Config& config);

// The plan of the first of machine.ranks; the others differ only in rounding.
// Fails with: kConfig and kInvalidArgument for a config or model that an engine refuses;
// kOutOfMemory where a budget cannot hold its pools, naming the smallest that can.
Plan plan(const Config& config, const ModelSpec& model, const RunMachine& machine);

}  // namespace sluice
