// The functions compute the plan of a run. The engine itself makes the same plan. The plan says how
// much memory the run takes in each tier, and how many bytes a step moves. The computation of a
// plan needs no engine, device or file, so a laptop can plan for a cluster.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <sluice/config.h>
#include <sluice/export.h>
#include <sluice/memory_marks.h>
#include <sluice/model_spec.h>
#include <sluice/step_report.h>

namespace sluice {

// A plan depends on these properties of a machine.
struct RunMachine {
  std::uint32_t ranks = 1;     // the number of ranks that train together
  bool device_is_host = true;  // false: the device is a GPU with memory of its own
  // If the config has no budgets, memory.device is all of `device_bytes`, and memory.host is half
  // of `host_memory_bytes`. If several ranks share a host, `host_memory_bytes` is the part of one
  // rank. The default of `device_bytes` is for a GPU of unknown size, and is enough for any plan.
  std::uint64_t device_bytes = std::uint64_t{1} << 62;
  std::uint64_t host_memory_bytes = 0;
  // Returns the free bytes of the file system that holds `path`. If there is no function, the plan
  // assumes that every path has enough space.
  std::function<std::uint64_t(const std::string& path)> free_bytes = {};
};

// One buffer that the engine makes at its start, or several such buffers of one kind.
struct Pool {
  Tier tier = Tier::kHost;
  std::string name;
  std::uint64_t size_bytes = 0;
  std::string reason;
};

struct Plan {
  std::vector<Pool> pools;
  // The total size of the pools in each tier, and the budgets of the device and the host.
  std::uint64_t device_bytes = 0;
  std::uint64_t host_bytes = 0;
  std::uint64_t nvme_bytes = 0;
  std::uint64_t device_budget_bytes = 0;
  std::uint64_t host_budget_bytes = 0;
  // The policy that says when blocks are updated. If the config says "auto", the member is the
  // policy that the engine uses while clipping is rare.
  OverlapPolicy policy{};
  // The traffic that one step causes. Config::Activations gives the step's micro-batches and their
  // order.
  Traffic traffic;
};

// Describes the drives and the memory of this machine. The result describes the host as the device.
// The device's memory has host_device_bytes(config) bytes. If the default budgets do not fit into
// the free memory, the result gives a memory size that is smaller than the machine's memory.
SLUICE_EXPORT RunMachine this_machine(const Config& config);

// Returns the size of a host device's memory (sluice/host_device.h). If the config sets
// memory.device, the size is memory.device. If the config does not set memory.device, the size is a
// quarter of the machine's memory, but at most half of the free memory.
SLUICE_EXPORT std::uint64_t host_device_bytes(const Config& config);

// Returns the plan of rank 0. The plans of other ranks differ only by rounding.
// Fails with:
// - kConfig or kInvalidArgument: an engine would refuse the config or the model.
// - kOutOfMemory: a budget cannot hold its pools. The message names the smallest budget that works.
SLUICE_EXPORT Plan plan(const Config& config, const ModelSpec& model, const RunMachine& machine);

}  // namespace sluice
