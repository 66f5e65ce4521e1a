// The rates that a plan uses. Calibration files of `sluice bench io` and `sluice bench adam` take
// precedence over assumed rates, and stated ones over both; each rate says where it is from.
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
  // As on the command line: sizes a second, and numbers such as "2e9".
  std::string read, write, copy;  // empty = not stated
  std::string duplex;             // "full", "half"
  std::optional<double> adam;     // parameters a second, of the CPU
  std::optional<double> device_adam;
  std::optional<double> flops;    // of the device, as reached
};

struct PlanRates {
  Rates rates;                       // without unit times
  double flops = 0;                  // a second
  std::vector<std::string> sources;  // a line each
};

// Storage's part of `rates` from bytes a second of reading and of writing, and `interference`: the
// time of both at once over the sum of one after the other, 1 on a half-duplex drive, 0.5 on one
// that does both at full rate.
void set_storage_rates(double read, double write, double interference, Rates& rates);

// Fails with: kConfig (an option), kInput (a calibration file that cannot be read or is none).
PlanRates plan_rates(const PlanRateOptions& options, const StateFormat& format);

}  // namespace sluice
