// Before a run begins, `sluice train --compare-memory` trains a few steps with the run's config.
// All state of this training is in memory. The cost of offloading is measured against the step time
// of this training. The comparison does not use T_min and T_bound, because both limits are computed
// from rates of the run itself. In the run, transfers and updates slow down computation.
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
  double step_s = 0;           // the mean of all steps except the first
  std::vector<double> losses;  // of every step
  std::uint64_t device_pool_bytes = 0;
  std::uint64_t host_pool_bytes = 0;

  // Returns true if this training and a run had the same losses, bit for bit. Only the steps that
  // exist in both trainings are compared. The run must have begun with the same state.
  bool has_losses(std::span<const double> losses_of_run) const;
};

struct ComparisonOptions {
  std::uint64_t steps = 2;  // must be at least 2
  std::uint32_t rank_count = 1;
  std::string init_file;  // a saved model to begin with; empty = fresh values
  bool is_quiet = false;
};

// Trains with all state in memory. Parameters are on the device. If the device has its own memory,
// optimizer state and gradients are on the device, too. Otherwise, optimizer state and gradients
// are in host memory. The function frees all memory of the training before it returns.
// settle_budgets() and resolve_order() must have replaced "auto" in `config`. `host` describes this
// rank's part of the host's memory.
// Fails with kOutOfMemory if the state does not fit into memory. Fails with kUnsupported if there
// are several ranks. Also fails with the errors of the engine and the trainer.
MemoryComparison train_in_memory(const TrainConfig& config, const HostMemory& host,
                                 const ComparisonOptions& options);

}  // namespace sluice
