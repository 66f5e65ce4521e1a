// How near a run's steps come to their limits: T_min and T_bound (engine/bound/bound.h) from the
// rates that the run has counted itself, those of storage from its calibration file where there is
// one.
//
// Thread rule: one thread at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <sluice/engine.h>
#include "base/trace/trace.h"
#include "engine/bound/bound.h"

namespace sluice {

struct StepLimits {
  StepCost least;  // T_min
  StepCost bound;  // T_bound
  Rates rates;
  OverlapPolicy policy{};
};

class LimitMeter {
 public:
  // `engine` must outlive the meter. `calibration`: written by `sluice bench io`; empty = none. One
  // without all of reads, writes and both counts as none.
  LimitMeter(const Engine& engine, ModelSpec model, std::uint32_t micro_batches,
             MicroBatchOrder order, std::string calibration);

  // A step has ended. The first counts for nothing: it touches memory for the first time.
  void note(const StepReport& report);

  // Nothing before the third step.
  std::optional<StepLimits> limits() const;

 private:
  Rates rates() const;

  const Engine& engine_;
  ModelSpec model_;
  std::uint32_t micro_batches_;
  MicroBatchOrder order_;
  std::string calibration_;
  bool is_calibrated_ = false;
  TraceCounts begin_;  // counters when the first step had ended
  std::uint64_t steps_ = 0;
  std::uint64_t storage_bytes_ = 0;
  WorkTimes work_;
  OverlapPolicy policy_{};
};

}  // namespace sluice
