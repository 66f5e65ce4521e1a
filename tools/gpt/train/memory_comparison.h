// The same training with all of its state in memory. The training in memory is measured right
// before a run (`sluice train --compare-memory`). The time of that training is the yardstick for
// the cost of offloading. T_min and T_bound are no such yardstick. The two limits are computed from
// rates measured in the run itself. In the run, transfers and updates make computation slower than
// it is alone.
//
// Thread rule: one thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/plan/host_memory.h"
#include "tools/gpt/train/train_config.h"

namespace sluice {

struct MemoryComparison {
  double step_s = 0;           // the mean without the first step, as of the run
  std::vector<double> losses;  // of every step
  std::uint64_t device_pool_bytes = 0;
  std::uint64_t host_pool_bytes = 0;

  // Whether a run that began with the same state had the same losses, bit for bit, in the steps of
  // both runs.
  bool has_losses(std::span<const double> losses_of_run) const;
};

struct ComparisonOptions {
  std::uint64_t steps = 2;  // at least
  std::uint32_t rank_count = 1;
  std::string init_file;  // a saved model to begin with; empty = fresh values
  bool is_quiet = false;
};

// The function trains with everything in memory. The parameters are on the device. Optimizer state
// and gradients are in host memory. If the device has its own memory, optimizer state and gradients
// are on the device, too. The function leaves nothing behind in memory. Budgets and order in
// `config` are settled. `host` is this rank's part of the host.
// Fails with kOutOfMemory if the memory does not hold the state, with kUnsupported for several
// ranks, and with the errors of the engine and the trainer.
MemoryComparison train_in_memory(const TrainConfig& config, const HostMemory& host,
                                 const ComparisonOptions& options);

}  // namespace sluice
