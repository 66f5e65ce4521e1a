// The output of a training run for the user and for scripts (docs/cli.md). The output begins with
// the table of pools, and ends with the JSON file. While steps run, the output has a line for each
// step. On a terminal, the output has a progress bar instead.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <sluice/engine.h>
#include "engine/plan/host_memory.h"
#include "tools/cli/output_file.h"
#include "tools/gpt/model/matmul.h"
#include "tools/gpt/train/checkpointing.h"
#include "tools/gpt/train/memory_comparison.h"
#include "tools/gpt/train/train_config.h"
#include "tools/gpt/train/trainer.h"
#include "tools/report/rank_memory.h"
#include "tools/report/step_limits.h"
#include "tools/report/step_log.h"

namespace sluice {

struct RunRecord {
  std::uint64_t parameters = 0;
  std::uint64_t state_bytes = 0;
  OptimizerState optimizer_state = OptimizerState::kFp32;
  std::uint64_t seed = 0;
  // The steps that were made before this process resumed the run. No value: it began with values of
  // its own.
  std::optional<std::uint64_t> resumed_steps;
  std::vector<StepRecord> steps;
  MicroBatchOrder order = MicroBatchOrder::kHorizontal;
  gpt::MatrixKernels matrix_kernels;
  std::string table_row;                       // gpt::table_row(): the choice of the library
  gpt::MatrixWork matrix_work;                 // on the host, including the validation
  std::vector<SettingChange> kernel_changes;   // since the run began, over all resumes
  std::vector<SettingChange> setting_changes;  // since the run began, of all other settings
  unsigned threads = 0;                        // for computation on the host and for the optimizer
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
  std::vector<SavedCheckpoint> checkpoints;
  std::optional<StepLimits> limits;
  std::optional<MemoryComparison> in_memory;  // measured before the run
};

// Returns the figures of the step with the number `step`. Steps are counted from 0. `peak_flops` is
// one rank's peak rate; 0 = unknown.
StepRecord record_of(const TrainConfig& config, const TrainedStep& trained, std::uint64_t step,
                     double time_s, std::uint32_t ranks, double peak_flops);

// Returns a table of the pools on every tier. The table says what each pool is for, and compares
// the sum of each tier with the tier's budget. The table also says whether the files on storage
// stay after the run. `config` must be the engine's config.
std::string pool_table(const Engine& engine, const Config& config, std::uint64_t activation_bytes,
                       const HostMemory& memory);

// Returns a text about the share of each library in the multiply-adds. The text is empty on a GPU.
std::string matrix_report(const RunRecord& run);

// Returns a text about the bytes that a step copies in memory. The number of bytes is the mean over
// all steps except the first.
std::string copy_report(const RunRecord& run);

// Returns a text that compares the run's speed with the speed of the same training in memory. The
// text is empty if the training in memory was not measured.
std::string memory_comparison_report(const RunRecord& run);

// Returns a text about the parts of a step's time. The text also compares the step's time with
// T_min and T_bound. The first step is left out.
std::string time_report(const RunRecord& run);

// Returns whether run.steps[place] had an update beside it, or in it. A step that was skipped has
// none, and neither has the step right after it.
bool has_update(const RunRecord& run, std::size_t place);

// Waits for the rest of the update of a step that has just ended. The wait becomes a part of the
// step's times, as in a trace of the run. A trace does not count such a wait after the last step.
void drain_step(Engine& engine, TrainedStep& trained);

// Returns a text with the validation loss and the loss of a bigram model. The text is empty if
// there was no validation.
std::string validation_report(const RunRecord& run);

// Returns the line of a progress bar after the step `record` of `steps` steps, in at most `columns`
// columns. A narrow terminal gets the figures alone. `left_s` is the time that is left.
std::string bar_line(const StepRecord& record, std::uint64_t steps, double left_s,
                     std::size_t columns);

// Shows one line for each step. On a terminal, the class shows a bar instead, and redraws the bar
// after every step.
class ProgressDisplay {
 public:
  ProgressDisplay(std::uint64_t steps, bool quiet);
  void show(const StepRecord& record);

 private:
  void show_bar(const StepRecord& record);

  std::uint64_t steps_;
  bool quiet_;
  bool is_terminal_;
  std::optional<std::uint64_t> first_;  // the steps before the first shown step
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// Fails with the errors of OutputFile.
void write_json(OutputFile& output, const RunRecord& run);

}  // namespace sluice
