// `sluice doctor`: checks what this machine offers. It says of each thing whether it is fine,
// slower than it could be, or in the way, with the line that mends it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

struct DoctorOptions {
  std::vector<std::string> paths{"/var/tmp"};
  std::string mpi_library;  // empty = where MpiWorld looks for it
  std::string sysfs = "/sys";
};

enum class Health : std::uint8_t { kOk, kWarn, kFail };

struct Finding {
  Health health = Health::kOk;
  std::string subject;  // "io_uring", "storage /var/tmp"
  std::string text;     // what is there
  std::string remedy;   // a line to run or change; empty when fine
};

// Looks at everything; leaves nothing behind.
std::vector<Finding> examine(const DoctorOptions& options);

// Prints a line for each finding, and its remedy. Returns kExitResource when one of them failed.
int run_doctor(const DoctorOptions& options);

}  // namespace sluice
