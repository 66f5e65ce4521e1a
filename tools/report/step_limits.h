// Computes the limits T_min and T_bound of a run's steps (engine/bound/bound.h), from the rates
// that the run has measured. If there is a calibration file, the storage rates come from this file.
//
// Thread rule: one thread at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <sluice/engine.h>
#include "base/trace/trace_recorder.h"
#include "engine/bound/bound.h"

namespace sluice {

struct StepLimits {
  StepCost least;  // T_min
  StepCost bound;  // T_bound
  Rates rates;
  OverlapPolicy policy{};
};

// The file that `sluice bench io` wrote; empty = none. The drives at `paths` are the run's.
// `sharing_ranks` ranks of a host share them.
struct LimitCalibration {
  std::string file;
  std::vector<std::string> paths = {};
  std::uint32_t sharing_ranks = 1;
};

class LimitMeter {
 public:
  // `engine` must outlive the meter. The meter ignores a calibration that lacks one of these rates:
  // reading, writing, or reading and writing at the same time. `commit_every` is the number of
  // steps per commit of the engine's durable store, if there is a store.
  LimitMeter(const Engine& engine, ModelSpec model, std::uint32_t micro_batches,
             MicroBatchOrder order, LimitCalibration calibration, std::uint32_t commit_every = 1);

  // step_begins() must be called immediately before each step, and note() immediately after it.
  // Evaluations between note() and step_begins() change no rate. The meter ignores the first step.
  // The first step is slower, because it touches memory for the first time.
  void step_begins() { begin_ = trace_counts(); }
  void note(const StepReport& report);

  // Returns nothing before the third step.
  std::optional<StepLimits> limits() const;

 private:
  Rates rates() const;

  const Engine& engine_;
  ModelSpec model_;
  std::uint32_t micro_batches_;
  MicroBatchOrder order_;
  LimitCalibration calibration_;
  std::uint32_t commit_every_;
  bool is_calibrated_ = false;
  TraceCounts first_;  // counters when the first step had ended
  TraceCounts begin_;  // and when the last step began
  std::uint64_t steps_ = 0;
  std::uint64_t storage_bytes_ = 0;
  std::int64_t storage_busy_ns_ = 0;
  std::uint64_t copied_bytes_ = 0;
  std::int64_t copy_busy_ns_ = 0;
  OverlapPolicy policy_{};
};

}  // namespace sluice
