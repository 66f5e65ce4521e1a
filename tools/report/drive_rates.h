// The rates of each drive in a file of `sluice bench io`.
//
// Thread rule: any thread.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace sluice {

// The rates at which one path of storage.paths reads and writes alone. 0 = not measured.
struct DriveRates {
  std::string path;
  double read_bytes_per_second = 0;
  double write_bytes_per_second = 0;
};
// Returns the rates of each path in a file of `sluice bench io`. Files of older versions have none.
// Fails with kInput if the file cannot be read, or is damaged.
std::vector<DriveRates> drive_rates(const std::string& io_file);

// Returns the absolute path without links, dots and a slash at the end. Folders that do not exist
// have such a name, too.
std::string one_name_of(const std::string& path);

// Reads a file of rates, of any of the benches.
// Fails with kInput if the file cannot be read, or is no JSON.
nlohmann::json read_rates_file(const std::string& path);

}  // namespace sluice
