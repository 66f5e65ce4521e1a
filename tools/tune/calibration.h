// A calibration of this machine. The calibration has the rates of the drives for each request size
// and depth, and the rate of Adam. The measurement of a calibration takes about 10 seconds. The
// calibration is kept in a file for later runs of `sluice tune`. The file names the hardware and
// the day of the measurement. `sluice tune` therefore notices a calibration that is old, or that
// comes from another machine.
//
// Thread rule: one thread measures. Any thread may read a finished calibration.
#pragma once

#include <cstddef>
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
  std::string hardware;                // the hardware for which the rates are valid
  std::int64_t made_s = 0;             // the time of the measurement, in seconds since 1970
  double took_s = 0;                   // how long the measurement took
  std::vector<DriveRate> drives = {};  // the rates of all paths together
  // The rate of each path when no other path is in use. The rates are measured with the optimizer's
  // I/O pattern. The list is empty if there is only one path.
  std::vector<double> path_rates = {};
  double adam_parameters_per_second = 0;

  // Sets the storage rates in `rates`, for requests of `request_bytes` bytes, with `depth` requests
  // in flight. Between the measured sizes and depths, the rates are interpolated over the
  // logarithms of size and depth. Beyond the measured sizes and depths, the nearest measured rate
  // is used. The latency is the time that a small read takes beyond the time to move its bytes. The
  // latency in `rates` is smaller by a share of 1 / `depth`, because the measured rates already
  // contain this share.
  void set_storage_rates_for(std::uint64_t request_bytes, std::uint32_t depth, Rates& rates) const;
};

struct CalibrationRequest {
  std::vector<std::string> paths;  // storage.paths
  StateFormat format;              // the format of the state that Adam updates
  unsigned threads = 0;            // threads of Adam; 0 = all granted cores
  IoBackend backend = IoBackend::kAuto;
};

// The number of days since the calibration was measured.
double age_days(const MachineCalibration& calibration);

// Returns a text that describes the processor, cores and memory of this machine. The text also
// describes the drives and the other settings of `request`.
// Fails with kInput if a path of `request` cannot be reached.
std::string hardware_of(const CalibrationRequest& request);

// `progress` receives a text about each measurement.
// Fails with the errors of hardware_of() and measure_io(). Fails with kOutOfMemory if there is not
// enough memory for Adam.
MachineCalibration calibrate(const CalibrationRequest& request,
                             const std::function<void(const std::string&)>& progress);

// Returns the path of the file that keeps a calibration of `hardware`. The file is below
// XDG_CACHE_HOME or ~/.cache. If neither XDG_CACHE_HOME nor the home folder is known, the path is
// empty.
std::string calibration_file(const std::string& hardware);

// Returns the calibration in the file `path`. The result is empty if the file does not exist,
// cannot be read, is not a calibration, is from other hardware or from a time to come, or has no
// rate of each of `paths` storage paths. If the file exists and the result is empty, `why` gives
// the reason.
std::optional<MachineCalibration> load_calibration(const std::string& path,
                                                   const std::string& hardware, std::size_t paths,
                                                   std::string& why);
// Writes `calibration` under a temporary name, and then renames the file to `path`. Also makes the
// file's folder. If the call fails, the result is a text with the reason. Otherwise, the result is
// empty.
std::string save_calibration(const std::string& path, const MachineCalibration& calibration);

}  // namespace sluice
