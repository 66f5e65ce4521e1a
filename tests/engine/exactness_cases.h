// This file lists placements and policies. Training has to give the same result under every listed
// placement and policy as in memory. The functions are pure, except that they may create folders
// for a config.
#pragma once

#include <filesystem>
#include <ostream>
#include <string>

#include <sluice/units.h>
#include "tests/support/toy_training.h"

namespace sluice::test {

struct Case {
  std::string name;
  void (*change)(Config& config);
  bool is_gpu = false;  // the device imitates a GPU
};

inline void PrintTo(const Case& value, std::ostream* out) {
  *out << value.name;
}

inline const Case kCases[] = {
    {"in_memory",
     [](Config& c) {
       c.placement = {TierChoice::kDevice, TierChoice::kHost};
     }},
    {"parameters_host",
     [](Config& c) {
       c.placement = {TierChoice::kHost, TierChoice::kHost};
     }},
    {"parameters_nvme",
     [](Config& c) {
       c.placement = {TierChoice::kNvme, TierChoice::kHost};
     }},
    {"optimizer_nvme",
     [](Config& c) {
       c.placement = {TierChoice::kDevice, TierChoice::kNvme};
     }},
    {"all_nvme",
     [](Config& c) {
       c.placement = {TierChoice::kNvme, TierChoice::kNvme};
     }},
    {"all_nvme_sync",
     [](Config& c) {
       c.placement = {TierChoice::kNvme, TierChoice::kNvme};
       c.storage.backend = IoBackend::kSync;
     }},
    {"all_nvme_one_thread",
     [](Config& c) {
       c.placement = {TierChoice::kNvme, TierChoice::kNvme};
       c.threads = 1;
     }},
    {"all_nvme_depth_1",
     [](Config& c) {
       c.placement = {TierChoice::kNvme, TierChoice::kNvme};
       c.storage.queue_depth = 1;
     }},
    {"all_nvme_large_blocks",
     [](Config& c) {
       c.placement = {TierChoice::kNvme, TierChoice::kNvme};
       c.storage.block_elements = 65536;
     }},
    {"small_budgets",
     [](Config& c) {
       c.memory.device_bytes = 300_KiB;
       c.memory.host_bytes = 900_KiB;
     }},
    {"medium_budgets",
     [](Config& c) {
       c.memory.device_bytes = 350_KiB;
       c.memory.host_bytes = 1200_KiB;
     }},
    {"large_host_budget",
     [](Config& c) {
       c.memory.device_bytes = 300_KiB;
       c.memory.host_bytes = 8_MiB;
     }},
    {"two_paths",
     [](Config& c) {
       c.placement = {TierChoice::kNvme, TierChoice::kNvme};
       c.storage.paths.push_back(c.storage.paths[0] + "/second");
       std::filesystem::create_directory(c.storage.paths[1]);
     }},
    {"all_device", [](Config& c) { c.placement.optimizer = TierChoice::kDevice; }},
    {"device_and_host", [](Config& c) { c.memory.device_bytes = 1400_KiB; }, true},
    {"device_and_nvme",
     [](Config& c) { c.memory = {.device_bytes = 1400_KiB, .host_bytes = 600_KiB}; }, true},
    // In the cases "*_copied", the device shares the host's memory, but leases and updates copy
    // data.
    {"in_memory_copied",
     [](Config& c) {
       c.placement = {TierChoice::kDevice, TierChoice::kHost};
       c.memory.unified = UnifiedMemory::kOff;
     }},
    {"parameters_host_copied",
     [](Config& c) {
       c.placement = {TierChoice::kHost, TierChoice::kHost};
       c.memory.unified = UnifiedMemory::kOff;
     }},
    {"large_host_budget_copied",
     [](Config& c) {
       c.memory = {.device_bytes = 300_KiB, .host_bytes = 8_MiB};
       c.memory.unified = UnifiedMemory::kOff;
     }},
    // In the cases "*_streamed", the device performs the updates, although the state has its home
    // in other memory or on storage.
    {"in_memory_streamed",
     [](Config& c) {
       c.placement = {TierChoice::kDevice, TierChoice::kHost};
       c.optimizer.update_on = UpdateProcessor::kDevice;
     },
     true},
    {"all_nvme_streamed",
     [](Config& c) {
       c.placement = {TierChoice::kNvme, TierChoice::kNvme};
       c.optimizer.update_on = UpdateProcessor::kDevice;
     },
     true},
    {"gradients_on_device_streamed",
     [](Config& c) {
       c.placement = {TierChoice::kHost, TierChoice::kHost, TierChoice::kDevice};
       c.optimizer.update_on = UpdateProcessor::kDevice;
     },
     true},
    {"small_budgets_streamed",
     [](Config& c) {
       c.memory.device_bytes = 600_KiB;
       c.memory.host_bytes = 900_KiB;
       c.optimizer.update_on = UpdateProcessor::kDevice;
     },
     true},
    {"unified_streamed",
     [](Config& c) {
       c.placement = {TierChoice::kDevice, TierChoice::kHost};
       c.optimizer.update_on = UpdateProcessor::kDevice;
     }},
};

// Each case has a policy, and a bound on the gradient norm. A bound of 0 means that there is no
// bound. There are bounds that never clip, bounds that sometimes clip, and bounds that always clip.
struct PolicyCase {
  std::string name;
  OverlapPolicy policy = OverlapPolicy::kSerial;
  double clip_norm = 1;
};

inline void PrintTo(const PolicyCase& value, std::ostream* out) {
  *out << value.name;
}

// This value selects a bound that lies between the gradient norms of the toy training's first
// steps.
inline constexpr double kBitesSometimes = -1;
inline double bound_that_bites_sometimes(std::uint32_t micro_batches) {
  switch (micro_batches) {
    case 1: return 221.9;
    case 2: return 164.3;
    default: return 125.92;
  }
}

inline constexpr double kNeverBites = 1e9;

inline double clip_norm_of(const PolicyCase& policy, std::uint32_t micro_batches) {
  return policy.clip_norm == kBitesSometimes ? bound_that_bites_sometimes(micro_batches)
                                             : policy.clip_norm;
}

inline const PolicyCase kPolicies[] = {
    {"serial", OverlapPolicy::kSerial, 1},
    {"deferred", OverlapPolicy::kDeferred, 1},
    {"eager", OverlapPolicy::kEager, 0},
    {"speculative_redone", OverlapPolicy::kSpeculative, 1},
    {"speculative_sometimes", OverlapPolicy::kSpeculative, kBitesSometimes},
    {"speculative_adopted", OverlapPolicy::kSpeculative, kNeverBites},
};

}  // namespace sluice::test
