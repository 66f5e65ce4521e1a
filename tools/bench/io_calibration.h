// The functions measure drives by pattern, request size and depth. The functions describe the
// result as a calibration file. `sluice bench io` prints the calibration. Plans and
// `storage.calibration` read the calibration, and `sluice tune` uses it in the search.
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

// One case, measured once in every round.
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

// All combinations of patterns, sizes and depths, with all paths at the same time. If there are
// several paths, each of them is also measured alone.
std::vector<IoSeries> io_cases(const std::vector<IoPattern>& patterns,
                               const std::vector<std::uint64_t>& requests,
                               const std::vector<std::uint32_t>& depths, std::size_t paths);

// The functions that measure_io() calls. Both functions may be empty.
struct IoListener {
  // Called when the files are written and the first round begins. If the machine refuses a backend,
  // `note` says so. Otherwise `note` is "".
  std::function<void(const IoBench& bench, const std::string& note)> began = {};
  // Called before each measurement. Rounds count from 0.
  std::function<void(std::uint32_t round, const IoCase& io_case)> goes_on = {};
};

// Measures `series` in rounds, because the rate of a shared drive drifts.
// Requires: each request size divides the largest size, and the file holds at least one request of
// the largest size.
// Fails with the errors of IoBench.
IoCalibration measure_io(const IoCalibrationOptions& options, std::vector<IoSeries> series,
                         const IoListener& listener = {});

// The case of `pattern` with the highest rate, for one drive or for all drives together. The result
// is null if there is no such case.
const IoSeries* best_of(const std::vector<IoSeries>& all, IoPattern pattern,
                        std::optional<std::uint32_t> drive = std::nullopt);
// The time for reading and writing together, divided by the sum of the times for reading alone and
// for writing alone. The result is 1 for a half-duplex drive, and 0.5 for a drive that does both at
// full rate. The result is empty if a pattern was not measured.
std::optional<double> interference_of(const std::vector<IoSeries>& all);

// The text of the calibration file.
nlohmann::json calibration_json(const IoCalibration& calibration);

}  // namespace sluice
