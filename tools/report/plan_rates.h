// The rates that a plan uses.
// Each source takes precedence over the sources before it:
// - Assumed rates, and a GPU's data sheet.
// - Figures of `sluice bench gpu`. For the drive, a drive's data sheet takes the place of these
//   figures.
// - Calibration files of `sluice bench io` and `sluice bench adam`.
// - Rates stated by options.
// Each rate is listed with its source.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/bound/step_cost.h"
#include "engine/plan/layout.h"

namespace sluice {

struct PlanRateOptions {
  std::string io_file;    // empty = none
  std::string adam_file;  // empty = none
  std::string gpu_file;   // of `sluice bench gpu`; empty = none
  // The texts of the options. Each text is a size per second, or a number such as "2e9".
  std::string read, write, copy;  // empty = not stated
  std::string link;               // a rank's link to the others; empty = it takes no time
  std::string drives;             // for drive_set(); empty = none
  std::string duplex;             // "full", "half"
  std::optional<double> adam;     // parameters a second, of the CPU
  std::optional<double> device_adam;
  std::optional<double> flops;        // of the device; the rate reached in practice
  std::optional<double> sheet_flops;  // the part of a data sheet's rate that is assumed
  std::optional<double> flush_ms;     // for which a flush occupies the drives
  bool is_on_host = false;  // the host computes, where one thread makes the updates of the device
  // The number of ranks that share the rates of storage and of the CPU.
  std::uint32_t sharing_ranks = 1;
};

struct PlanRates {
  Rates rates;                       // without the units' times
  double flops = 0;                  // a second
  std::vector<std::string> sources;  // one line for each rate
};

// The function sets the storage rates in `rates`. `read` and `write` are in bytes per second.
// `interference` is the time of reading and writing at the same time, divided by the time of doing
// both in turn. The value is 1 on a half-duplex drive, and 0.5 on a drive that does both at full
// rate.
void set_storage_rates(double read, double write, double interference, Rates& rates);

// Fails with kConfig for a wrong option, or for a GPU's figures if the host computes. Fails with
// kInput if a file cannot be read, or does not have the figures of its benchmark.
PlanRates plan_rates(const PlanRateOptions& options, const StateFormat& format);

}  // namespace sluice
