// This log writes the figures of a training run's steps as rows of a CSV file, and as lines of
// JSON. The figures of a step are written when the step ends. If the run is killed, the files
// therefore contain the figures of all earlier steps.
//
// Thread rule: one thread.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>

#include <nlohmann/json_fwd.hpp>

#include <sluice/engine.h>
#include "tools/cli/output_file.h"

namespace sluice {

struct StepRecord {
  std::uint64_t step = 0;  // counted from 1
  double loss = 0;
  double gradient_norm = 0;
  double loss_scale = 1;
  bool skipped = false;
  double time_s = 0;
  std::uint64_t tokens = 0;
  double flops = 0;       // of the model's products, on all ranks
  double peak_flops = 0;  // per second, of all ranks together; 0 = unknown
  std::uint64_t nvme_read_bytes = 0;
  std::uint64_t nvme_write_bytes = 0;
  RankTraffic rank_traffic;
  std::uint64_t activation_out_bytes = 0;
  std::uint64_t activation_in_bytes = 0;
  CopyTraffic copies;  // in memory
  double stall_s = 0;
  double stall_for_update_s = 0;
  double optimizer_s = 0;
  StepTimes times;
  std::int64_t drained_ns = 0;  // the part of `times` after finish(), for the rest of the update
  OverlapPolicy policy = OverlapPolicy::kSerial;
  std::optional<double> validation_loss = {};  // after the step; empty = not measured

  double tokens_per_s() const { return static_cast<double>(tokens) / time_s; }
  double flops_per_s() const { return flops / time_s; }
  // The model FLOP utilization: the rate that the step reached, divided by the peak rate.
  std::optional<double> mfu() const {
    return peak_flops > 0 ? std::optional(flops_per_s() / peak_flops) : std::nullopt;
  }
};

// Returns null for NaN, because JSON has no NaN. The gradient norm of a skipped step can be NaN.
nlohmann::ordered_json json_number(double value);
// Returns null if there is no value. If there is a value, the result is the same as for a double.
nlohmann::ordered_json json_number(const std::optional<double>& value);
// Returns the figures of a step, for the output of --json. The limits T_min and T_bound are
// missing, because they are not known until the end of the run.
nlohmann::ordered_json json_of(const StepRecord& step);

class StepLog {
 public:
  // The log contains the last step, every step whose number is a multiple of `every`, and every
  // step with a validation loss. The files must outlive the log.
  StepLog(OutputFile& csv, OutputFile& json_lines, std::uint64_t every);

  bool is_due(const StepRecord& step) const { return step.step % every_ == 0; }
  // Opens the files and writes the header of the CSV file. If a run resumes after `steps_before`
  // steps, the files keep the rows of the first `steps_before` steps.
  // Fails with the errors of OutputFile.
  void begin(std::uint64_t steps_before);
  // Gives both files their final names.
  void accept() noexcept;
  // Adds a step to the log. If a write fails, one line on standard error reports the failure. The
  // file then receives no more rows, but training continues.
  void add(const StepRecord& step);
  // Each of the two functions adds the last step to its file, unless the file already contains this
  // step. Each function fails with the first error that occurred when its file was written.
  void finish_csv();
  void finish_json_lines();

 private:
  // A Rows object has one of the two files, and the first error that occurred with this file.
  struct Rows {
    OutputFile& file;
    std::exception_ptr failure;
  };

  void write(const StepRecord& step);
  static void append(Rows& rows, const std::string& text);
  void finish(Rows& rows);

  std::uint64_t every_;
  Rows csv_;
  Rows json_lines_;
  std::optional<StepRecord> pending_;  // the newest step, if it is not written yet
};

}  // namespace sluice
