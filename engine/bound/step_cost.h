// The rates of a machine, and the cost of a step at these rates. The bounds are computed from these
// rates and costs (engine/bound/bound.h). Plain data; pure.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include <sluice/config.h>
#include <sluice/step_report.h>
#include "engine/plan/layout.h"
#include "engine/plan/placement.h"
#include "engine/plan/traffic.h"
#include "engine/plan/window_plan.h"
#include "io/duplex.h"

namespace sluice {

// The machine's rates for one rank. If a rate is 0, the work at this rate takes no time.
struct Rates {
  double read_bytes_per_second = 0;  // of all drives together
  double write_bytes_per_second = 0;
  Duplex duplex = Duplex::kFull;
  double latency_s = 0;  // of a storage request, in addition to its transfer
  double flush_s = 0;    // how long each flush of a commit occupies the drives
  // The size of the drives' write cache. If the size is 0, there is no cache. A flush first writes
  // out this cache (io/write_cache_model.h).
  std::uint64_t write_cache_bytes = 0;
  double up_bytes_per_second = 0;    // host to device
  double down_bytes_per_second = 0;  // device to host
  double adam_parameters_per_second = 0;
  double link_bytes_per_second = 0;              // between ranks, each way
  double norm_parameters_per_second = 0;         // gradient norms, and additions of micro-batches
  double device_adam_parameters_per_second = 0;  // for state at home on the device
  // Bytes that host memory reads and writes, for the cores, the copies and the drives together.
  double host_memory_bytes_per_second = 0;
  std::vector<UnitTime> units;  // by unit
};

enum class Resource : std::uint8_t {
  kCompute,
  kStorageRead,   // full duplex
  kStorageWrite,  // full duplex
  kStorage,       // half duplex: reads and writes
  kCopyUp,
  kCopyDown,
  kCpu,           // Adam, norms and additions
  kDeviceUpdate,  // overlaps computation as far as the memory's rate allows
  kLinks,         // between ranks; only in plans
  // The bandwidth of host memory. Updates, norms, copies and storage draw on it at the same time,
  // each at a rate that it reaches alone.
  kHostMemory,
};
inline constexpr std::size_t kResourceCount = 10;

std::string_view name_of(Resource resource);

// The cost of one step in the steady state, from one begin_step to the next.
struct StepCost {
  double step_s = 0;
  std::array<double, kResourceCount> busy_s{};  // by Resource
  Traffic traffic;

  double busy(Resource resource) const { return busy_s[static_cast<std::size_t>(resource)]; }
  Resource scarcest() const;
};

// A late unit makes up for its missed updates before the step uses the unit (optimizer.untouched
// "lazy").
struct LateUnit {
  UnitId unit{};
  std::uint32_t missed_updates = 0;
};

// The bytes of host memory that the update of one element reads and writes.
double update_bytes_per_element(const StateFormat& format);

// The inputs of the bounds. All members must outlive the call.
struct StepShape {
  const Layout& layout;
  const Placement& placement;
  const Schedule& schedule;  // a training schedule
  const WindowPlan& window;
  const Rates& rates;
  const ActivationPlan* activations = nullptr;  // null: the application keeps activations
  // The number of updates from one commit to the next, if the placement has copies for commits.
  std::uint32_t commit_every = 1;
  // The entry of a scheduled use is kScheduled. The entry of an announced use is the number of uses
  // that were computed before the announcement. The list is empty if the step announces no use.
  std::span<const std::uint32_t> announced_after = {};
  std::span<const LateUnit> late_units = {};  // of each step

  static constexpr std::uint32_t kScheduled = UINT32_MAX;
};

}  // namespace sluice
