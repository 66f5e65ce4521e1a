// A calibration of this machine: the rates of its drives by request size and depth, and the rate of
// Adam. A calibration takes about 10 seconds to measure, and is kept in a file for later runs of
// `sluice tune`. The file names the hardware and the day, so a calibration of another machine or of
// long ago is noticed.
//
// Thread rule: one thread measures. Any thread may read a finished calibration.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/bound/step_cost.h"
#include "tools/bench/io_bench.h"

namespace sluice {

struct DriveRate {
  IoPattern pattern = IoPattern::kRead;
  std::uint64_t request_bytes = 0;
  std::uint32_t depth = 0;
  double bytes_per_second = 0;
};

struct MachineCalibration {
  std::string hardware;                // what must be the same for the rates to hold
  std::int64_t made_s = 0;             // the time of the measurement, in seconds since 1970
  double took_s = 0;                   // how long it took
  std::vector<DriveRate> drives = {};  // of all paths together
  // The rate of the optimizer's pattern on each path by itself. The list is empty for a single
  // path.
  std::vector<double> path_rates = {};
  double adam_parameters_per_second = 0;

  // Sets the storage rates for requests of `request_bytes`. `depth` requests are in flight. A rate
  // between the measured sizes and depths is interpolated over the logarithms. Beyond the measured
  // sizes and depths, the nearest rate counts. The latency is that of a small read alone, minus the
  // part that other requests in flight hide.
  void set_storage_rates_for(std::uint64_t request_bytes, std::uint32_t depth, Rates& rates) const;
};

struct CalibrationRequest {
  std::vector<std::string> paths;  // storage.paths
  StateFormat format;              // of the state that Adam updates
  unsigned threads = 0;            // of Adam; 0 = all granted cores
  IoBackend backend = IoBackend::kAuto;
};

// The days since the measurement.
double age_days(const MachineCalibration& calibration);

// Describes the processor, cores, memory and drives of this machine for `request`.
// Fails with kInput if a path cannot be reached.
std::string hardware_of(const CalibrationRequest& request);

// `progress` receives a text about each measurement.
// Fails with kNoSpace, kInput, kIo, kDamaged or kOutOfMemory.
MachineCalibration calibrate(const CalibrationRequest& request,
                             const std::function<void(const std::string&)>& progress);

// The file in which calibrations of this hardware are kept, in XDG_CACHE_HOME or ~/.cache. The path
// is empty if neither folder is known.
std::string calibration_file(const std::string& hardware);

// Returns the calibration in `path`. The result is empty if the file does not exist, cannot be
// read, is not a calibration, or is from other hardware. If the file exists, `why` then gives the
// reason.
std::optional<MachineCalibration> load_calibration(const std::string& path,
                                                   const std::string& hardware, std::string& why);
// The function writes the file by a rename, and makes its folder. Returns the reason of a failure.
// The text is empty if nothing has failed.
std::string save_calibration(const std::string& path, const MachineCalibration& calibration);

}  // namespace sluice
