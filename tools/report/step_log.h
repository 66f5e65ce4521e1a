// The figures of a training run's steps. Each step has one row of CSV and one line of JSON. The
// figures are written when the step ends, so a killed run leaves the figures of all earlier steps.
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
  double flops = 0;       // of the model's products, of all ranks
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
  OverlapPolicy policy = OverlapPolicy::kSerial;
  std::optional<double> validation_loss = {};  // after the step, where it was measured

  double tokens_per_s() const { return static_cast<double>(tokens) / time_s; }
  double flops_per_s() const { return flops / time_s; }
  // The model FLOP utilization, which is the part of the peak rate that the step reached.
  std::optional<double> mfu() const {
    return peak_flops > 0 ? std::optional(flops_per_s() / peak_flops) : std::nullopt;
  }
};

// Returns null for NaN, which JSON does not have. The gradient norm of a skipped step is such a
// number.
nlohmann::ordered_json json_number(double value);
// The result is also null if there is no value.
nlohmann::ordered_json json_number(const std::optional<double>& value);
// The figures of a step in `--json`. The limits are not included, because they are known only at
// the end of the run.
nlohmann::ordered_json json_of(const StepRecord& step);

class StepLog {
 public:
  // The log has the last step, and every step whose number is a multiple of `every`. The files must
  // outlive the log.
  StepLog(OutputFile& csv, OutputFile& json_lines, std::uint64_t every);

  bool is_due(const StepRecord& step) const { return step.step % every_ == 0; }
  // Opens the files and writes the header of the CSV file. A run that resumes after `steps_before`
  // steps keeps the files' rows of these steps.
  // Fails with the errors of OutputFile.
  void begin(std::uint64_t steps_before);
  // Gives both files their final names.
  void accept() noexcept;
  // If a write fails, one line on standard error says so, and the file gets no more rows. Training
  // goes on.
  void add(const StepRecord& step);
  // Adds the last step.
  // Fails with the first failure of each file.
  void finish_csv();
  void finish_json_lines();

 private:
  // One of the two files.
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
