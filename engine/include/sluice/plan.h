// The plan of a run, identical to the plan that the engine makes. The plan says how much memory the
// run takes in each tier, and how many bytes a step moves. No engine, device or file is needed, so
// a laptop can plan for a cluster.
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

// The part of the machine that a plan depends on.
struct RunMachine {
  std::uint32_t ranks = 1;     // training together
  bool device_is_host = true;  // otherwise the device has its own memory, a GPU's
  // Without budgets in the config, memory.device is all of `device_bytes`, and memory.host is half
  // of `host_memory_bytes`. Where several ranks share a host, `host_memory_bytes` is one rank's
  // part. The default of `device_bytes`, for a GPU of unknown size, is enough for any plan.
  std::uint64_t device_bytes = std::uint64_t{1} << 62;
  std::uint64_t host_memory_bytes = 0;
  // The free bytes of the file system that holds a path. If this is empty, every path has enough
  // room.
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
  // The sums of the pools by tier, and the budgets of device and host.
  std::uint64_t device_bytes = 0;
  std::uint64_t host_bytes = 0;
  std::uint64_t nvme_bytes = 0;
  std::uint64_t device_budget_bytes = 0;
  std::uint64_t host_budget_bytes = 0;
  // The policy that says when blocks are updated. If the config says "auto", this is the policy
  // that holds while clipping is rare.
  OverlapPolicy policy{};
  // The traffic of a step with the micro-batches and the order of Config::Activations.
  Traffic traffic;
};

// Describes the drives and the memory of this machine, with the host as the device. If the default
// budgets would not fit into the free memory, the result states less memory than the machine has.
// The device is as large as host_device_bytes(config).
SLUICE_EXPORT RunMachine this_machine(const Config& config);

// The memory of a host device (sluice/host_device.h). The size is memory.device, if the config sets
// memory.device. If the config does not set memory.device, the size is a quarter of the machine's
// memory, but at most half of the free memory.
SLUICE_EXPORT std::uint64_t host_device_bytes(const Config& config);

// The plan of rank 0; the plans of other ranks differ only in rounding.
// Fails with:
// - kConfig or kInvalidArgument: an engine would refuse the config or the model.
// - kOutOfMemory: a budget cannot hold its pools. The message names the smallest budget that can.
SLUICE_EXPORT Plan plan(const Config& config, const ModelSpec& model, const RunMachine& machine);

}  // namespace sluice
