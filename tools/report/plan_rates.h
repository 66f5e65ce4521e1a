// The rates that a plan uses. Figures of `sluice bench gpu` take precedence over assumed rates and
// a GPU's data sheet, a drive's data sheet over the bench's drive, calibration files of `sluice
// bench io` and `sluice bench adam` over all of these, and rates stated by options over everything.
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
  // The texts of the options: sizes a second, or numbers such as "2e9".
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
  // The ranks that share the rates of storage and of the CPU.
  std::uint32_t sharing_ranks = 1;
};

struct PlanRates {
  Rates rates;                       // without the units' times
  double flops = 0;                  // a second
  std::vector<std::string> sources;  // one line for each rate
};

// Sets the storage rates in `rates`. `read` and `write` are bytes a second. `interference` is the
// time of reading and writing at the same time, divided by the time of doing both in turn. The
// value is 1 on a half-duplex drive, and 0.5 on a drive that does both at full rate.
void set_storage_rates(double read, double write, double interference, Rates& rates);

// Fails with: kConfig (an option, or a GPU's figures where the host computes), kInput (a file that
// cannot be read, or does not have the figures of its benchmark).
PlanRates plan_rates(const PlanRateOptions& options, const StateFormat& format);

}  // namespace sluice
