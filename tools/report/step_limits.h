// Compares a run's steps with their limits T_min and T_bound (engine/bound/bound.h). The limits
// follow from the rates that the run has measured. The storage rates come from a calibration file
// if the run has one.
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
  // `engine` must outlive the meter. `calibration` is a file that `sluice bench io` wrote; empty =
  // none. A file that lacks reads, writes or the mix of both is ignored. `commit_every` is that of
  // the engine's durable store, if the engine has a durable store.
  LimitMeter(const Engine& engine, ModelSpec model, std::uint32_t micro_batches,
             MicroBatchOrder order, std::string calibration, std::uint32_t commit_every = 1);

  // Must be called at the end of each step. The first step is ignored, because it touches memory
  // for the first time.
  void note(const StepReport& report);

  // Returns nothing before the third step.
  std::optional<StepLimits> limits() const;

 private:
  Rates rates() const;

  const Engine& engine_;
  ModelSpec model_;
  std::uint32_t micro_batches_;
  MicroBatchOrder order_;
  std::string calibration_;
  std::uint32_t commit_every_;
  bool is_calibrated_ = false;
  TraceCounts begin_;  // counters when the first step had ended
  std::uint64_t steps_ = 0;
  std::uint64_t storage_bytes_ = 0;
  WorkTimes work_;
  OverlapPolicy policy_{};
};

}  // namespace sluice
