// `sluice bench io` measures the rates of the drives behind storage paths, for each request size
// and depth. The command writes the rates to a calibration file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

struct BenchIoOptions {
  std::vector<std::string> paths;
  std::string size = "1GiB";          // size of the file on each path
  std::vector<std::string> patterns;  // empty = read, write, mixed
  std::vector<std::string> requests;  // empty = 1MiB, 4MiB
  std::vector<std::uint32_t> depths;  // empty = 4, 16, 32
  std::uint32_t rounds = 3;
  std::string backend = "auto";
  std::string json_file;
  std::string plot_file;
};

// Prints a table, writes the calibration, and returns the exit code. If there are several paths,
// the command measures all drives at the same time, and then each drive alone.
// Fails with kConfig if an option is wrong, and with kUnsupported if the machine lacks the I/O
// backend. Also fails with the errors of OutputFile and IoBench.
int run_bench_io(const BenchIoOptions& options);

}  // namespace sluice
