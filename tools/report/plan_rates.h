// The rates that a plan uses, and the source of each rate. Each source in this list takes
// precedence over the earlier sources:
// - Assumed rates, and a GPU's data sheet.
// - Figures of `sluice bench gpu`. If the data sheet of a drive is given, the data sheet replaces
//   these figures for the drive.
// - Calibration files of `sluice bench io` and `sluice bench adam`.
// - Rates that the options give.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/bound/step_cost.h"
#include "engine/plan/layout.h"
#include "tools/report/drive_rates.h"

namespace sluice {

struct PlanRateOptions {
  std::string io_file;  // empty = none
  // The run's paths. If `io_file` also has other drives, the rates are those of the run's drives.
  // If `io_file` lacks one of the paths, the rates are those of all drives together.
  std::vector<std::string> io_paths;
  // If the value is true, the rates of `io_file` are those of reading or writing alone. Otherwise
  // they are such that reading and writing at once takes the measured time.
  bool is_unscaled = false;
  std::string adam_file;  // empty = none
  std::string gpu_file;   // output of `sluice bench gpu`; empty = none
  // The texts of the options. Each text is a size, such as 2GB, or a number, such as "2e9". The
  // unit is bytes per second.
  std::string read, write, copy;  // empty = not stated
  // The rate of host memory, reading and writing together. If empty, host memory takes no time,
  // unless `gpu_file` has its rate.
  std::string host_memory;
  std::string link;            // a rank's link to other ranks; empty = transfers take no time
  std::string drives;          // for drive_set(); empty = none
  std::string duplex;          // "full", "half"
  std::optional<double> adam;  // parameters per second of the CPU
  std::optional<double> device_adam;
  std::optional<double> flops;        // the rate that the device reaches in practice
  std::optional<double> sheet_flops;  // assumed rate, a part of the data sheet's rate
  std::optional<double> flush_ms;     // the time for which a flush occupies the drives
  bool is_on_host = false;  // true: the host computes, and one thread makes the device's updates
  // The number of threads that compute on this machine. If the number is 0, the plan assumes a
  // machine with a GPU.
  unsigned host_threads = 0;
  // The number of ranks that share the rates of storage and of the CPU.
  std::uint32_t sharing_ranks = 1;
};

// The rate at which one core of the host is assumed to compute matrix products.
inline constexpr double kAssumedCoreFlops = 50e9;

struct PlanRates {
  Rates rates;                       // without the units' times
  double flops = 0;                  // operations per second
  std::vector<std::string> sources;  // one line for each rate
};

// Sets the storage rates in `rates`. `read` and `write` are in bytes per second. `interference` is
// the ratio of two times. The first time is the time of reading and writing at the same time. The
// second time is the time for reading alone plus the time for writing alone. The ratio is 1 for a
// half-duplex drive. The ratio is 0.5 for a drive that reads and writes at full rate at the same
// time.
void set_storage_rates(double read, double write, double interference, Rates& rates);

// Fails with kConfig if an option is wrong, or if GPU figures are given although the host computes.
// Fails with kInput if a file cannot be read, or lacks the figures of its benchmark.
PlanRates plan_rates(const PlanRateOptions& options, const StateFormat& format);

}  // namespace sluice
