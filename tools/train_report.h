// What a training run tells the user and scripts: the table of pools at the start, a line for each
// step or a progress bar on a terminal, and the JSON and CSV files at the end (docs/cli.md).
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "tools/rank_memory.h"
#include "tools/step_limits.h"
#include "tools/train_config.h"

namespace sluice {

struct StepRecord {
  std::uint64_t step = 0;  // counted from 1
  double loss = 0;
  double gradient_norm = 0;
  double loss_scale = 1;
  bool skipped = false;
  double time_s = 0;
  std::uint64_t tokens = 0;
  std::uint64_t nvme_read_bytes = 0;
  std::uint64_t nvme_write_bytes = 0;
  RankTraffic rank_traffic;
  std::uint64_t activation_out_bytes = 0;
  std::uint64_t activation_in_bytes = 0;
  double stall_s = 0;
  double stall_for_update_s = 0;
  double optimizer_s = 0;
  StepTimes times;
  OverlapPolicy policy = OverlapPolicy::kSerial;
};

struct RunRecord {
  std::uint64_t parameters = 0;
  std::uint64_t state_bytes = 0;
  std::uint64_t seed = 0;
  std::vector<StepRecord> steps;
  MicroBatchOrder order = MicroBatchOrder::kHorizontal;
  Traffic predicted;
  std::uint64_t device_pool_bytes = 0;
  std::uint64_t host_pool_bytes = 0;
  std::uint64_t activation_bytes = 0;
  PhaseMarks buffers;  // over all steps
  std::vector<RankMemory> ranks;
  std::optional<double> validation_loss;
  std::optional<double> bigram_cross_entropy;
  std::string state_sha256;
  bool interrupted = false;
  std::optional<StepLimits> limits;
};

// The pools of every tier with their reasons, and each tier's sum against its budget.
std::string pool_table(const Engine& engine, std::uint64_t activation_bytes);

// Where the time of the steps went, all but the first, and how near they came to their limits.
std::string time_report(const RunRecord& run);

// One line for `record`, or, on a terminal, a bar that replaces the one before it.
class ProgressDisplay {
 public:
  ProgressDisplay(std::uint64_t steps, bool quiet);
  void show(const StepRecord& record);
  // Leaves the bar's line, so that what follows starts on a new one.
  void finish();

 private:
  void show_bar(const StepRecord& record);

  std::uint64_t steps_;
  bool quiet_;
  bool is_terminal_;
  bool bar_is_open_ = false;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// Fails with: kInput when the file cannot be written.
void write_json(const std::string& path, const RunRecord& run);
// One row a step, with a header.
void write_csv(const std::string& path, const RunRecord& run);

}  // namespace sluice
