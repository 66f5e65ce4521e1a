// The functions measure the rates of drives for each pattern, request size and depth.
// calibration_json() returns the results in the form of a calibration file. `sluice bench io`
// prints the results and writes the file. `sluice plan` can read the file. The config key
// `storage.calibration` can name the file. `sluice tune` calls the same functions, and uses the
// measured rates in its search.
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
#include "tools/report/median.h"

namespace sluice {

// One case and its measured rates. Every round measures each case once.
struct IoSeries {
  IoCase io_case;
  std::vector<double> rates = {};  // bytes per second
  std::vector<double> cpu_s_per_gib = {};

  double rate() const { return median(rates); }
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

// Returns one case for each combination of pattern, request size and depth. Each of these cases
// measures all paths at the same time. If there are several paths, the list also has cases that
// measure a single path.
std::vector<IoSeries> io_cases(const std::vector<IoPattern>& patterns,
                               const std::vector<std::uint64_t>& requests,
                               const std::vector<std::uint32_t>& depths, std::size_t paths);

// The functions that measure_io() calls to report its progress. Both functions may be empty.
struct IoListener {
  // This function is called after the files have been written and before the first round. If the
  // machine refuses an I/O backend, `note` gives the reason. Otherwise `note` is "".
  std::function<void(const IoBench& bench, const std::string& note)> began = {};
  // This function is called before each measurement. Rounds are numbered from 0.
  std::function<void(std::uint32_t round, const IoCase& io_case)> goes_on = {};
};

// Each round measures every case of `series` once. A slow change in the rate of a shared drive
// therefore affects all cases equally.
// Requires: each request size divides the largest size, and the file holds at least one request of
// the largest size.
// Fails with the errors of IoBench.
IoCalibration measure_io(const IoCalibrationOptions& options, std::vector<IoSeries> series,
                         const IoListener& listener = {});

// Returns the case with the highest rate among the cases with this `pattern` and `drive`. An empty
// `drive` stands for all drives together. Returns null if there is no such case.
const IoSeries* best_of(const std::vector<IoSeries>& all, IoPattern pattern,
                        std::optional<std::uint32_t> drive = std::nullopt);
// Returns the ratio of two times. The first time is the time of reading and writing at the same
// time. The second time is the time of reading alone plus the time of writing alone. The ratio is 1
// for a half-duplex drive. The ratio is 0.5 for a drive that reads and writes at full rate at the
// same time. The result is empty if a pattern was not measured.
std::optional<double> interference_of(const std::vector<IoSeries>& all);

// Returns the content of the calibration file.
nlohmann::json calibration_json(const IoCalibration& calibration);

}  // namespace sluice
