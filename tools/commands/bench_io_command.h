// `sluice bench io`: the rates of the drives behind storage paths, by request size and depth, and a
// calibration file of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

struct BenchIoOptions {
  std::vector<std::string> paths;
  std::string size = "1GiB";          // of the file on each path
  std::vector<std::string> patterns;  // empty = read, write, mixed
  std::vector<std::string> requests;  // empty = 1MiB, 4MiB
  std::vector<std::uint32_t> depths;  // empty = 4, 16, 32
  std::uint32_t rounds = 3;
  std::string backend = "auto";
  std::string json_file;
};

// Prints a table and writes the calibration: with several paths, of all at once and of each by
// itself. Returns the exit code.
// Fails with: kConfig (an option), kNoSpace, kInput, kIo, kDamaged, kUnsupported.
int run_bench_io(const BenchIoOptions& options);

}  // namespace sluice
