// `sluice doctor` checks the features of this machine. Each finding is about one feature. The
// finding says whether the feature is fine, is slower than possible, or prevents a run. If a
// feature is not fine, the finding also says how to repair the problem.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

struct DoctorOptions {
  std::vector<std::string> paths{"/var/tmp"};
  std::string mpi_library = {};   // empty = MpiWorld searches for the library
  std::string nccl_library = {};  // empty = libnccl.so.2
  std::string sysfs = "/sys";
  std::string json_file = {};  // empty = none; "-" = standard output
};

enum class Health : std::uint8_t { kOk, kWarn, kFail };

struct Finding {
  Health health = Health::kOk;
  std::string subject;  // "io_uring", "storage /var/tmp"
  std::string text;     // what the check found
  std::string remedy;   // a command to run or a line to change; empty if there is no problem
};

// Runs all checks. The checks leave no files behind.
std::vector<Finding> examine(const DoctorOptions& options);

// Prints each finding and its remedy. Returns kExitResource if a finding has Health::kFail.
// Fails with the errors of OutputFile::check().
int run_doctor(const DoctorOptions& options);

}  // namespace sluice
