// The functions measure drives by pattern, request size and depth, and write the results as the
// text of a calibration file. `sluice bench io` prints the calibration. `sluice plan` and the
// config key `storage.calibration` read the file, and `sluice tune` searches with these rates.
//
// Thread rule: one measurement at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include <sluice/config.h>
#include "tools/bench/io_bench.h"

namespace sluice {

// One case, and the rates that the rounds measured for the case. Every round measures each case
// once.
struct IoSeries {
  IoCase io_case;
  std::vector<double> rates = {};  // bytes a second
  std::vector<double> cpu_s_per_gib = {};

  double rate() const { return median(rates); }
  static double median(std::vector<double> values);
};

struct IoCalibrationOptions {
  std::vector<std::string> paths;
  std::uint64_t file_bytes = 0;  // on each path
  std::uint32_t rounds = 1;
  IoBackend backend = IoBackend::kAuto;
};

struct IoCalibration {
  IoCalibrationOptions options;
  std::vector<IoSeries> series;
  std::string queue;
  bool is_direct = false;
};

// The cases for all combinations of patterns, request sizes and depths, with all paths at the same
// time. If there are several paths, the list also has cases that measure each path alone.
std::vector<IoSeries> io_cases(const std::vector<IoPattern>& patterns,
                               const std::vector<std::uint64_t>& requests,
                               const std::vector<std::uint32_t>& depths, std::size_t paths);

// The functions that measure_io() calls to report its progress. Both functions may be empty.
struct IoListener {
  // Called after the files were written, before the first round. If the machine refuses an I/O
  // backend, `note` says so. Otherwise `note` is "".
  std::function<void(const IoBench& bench, const std::string& note)> began = {};
  // Called before each measurement. The first round has the number 0.
  std::function<void(std::uint32_t round, const IoCase& io_case)> goes_on = {};
};

// Measures all cases of `series` once per round, because the rate of a shared drive drifts.
// Requires: each request size divides the largest size, and the file holds at least one request of
// the largest size.
// Fails with the errors of IoBench.
IoCalibration measure_io(const IoCalibrationOptions& options, std::vector<IoSeries> series,
                         const IoListener& listener = {});

// Returns the case of `pattern` with the highest rate, for one drive or for all drives together.
// Returns null if there is no such case.
const IoSeries* best_of(const std::vector<IoSeries>& all, IoPattern pattern,
                        std::optional<std::uint32_t> drive = std::nullopt);
// Returns a ratio of times. The time for reading and writing at once is divided by the sum of the
// times for reading alone and for writing alone. The ratio is 1 for a half-duplex drive. It is 0.5
// for a drive that reads and writes at full rate at the same time. The result is empty if a pattern
// was not measured.
std::optional<double> interference_of(const std::vector<IoSeries>& all);

// The text of the calibration file.
nlohmann::json calibration_json(const IoCalibration& calibration);

}  // namespace sluice
