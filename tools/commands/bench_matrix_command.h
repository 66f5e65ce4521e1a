// `sluice bench matrix` measures the values that `sluice plan --matrix` predicts. The command
// trains a small model on the ranks that mpirun starts. The command prints the planned values
// beside the measured values.
#pragma once

#include <cstdint>
#include <string>

namespace sluice {

struct BenchMatrixOptions {
  std::uint64_t parameters = 8'000'000;
  std::uint32_t units = 8;
  unsigned steps = 5;  // measured steps of each cell
  std::string path = "/var/tmp";
  std::string rate = "400MB";  // bytes per second of each rank's drive
  double compute_ms = 200;     // time of a step's computation
  std::string json_file;
  std::string plot_file;
};

// Rank 0 prints the table. Returns the exit code.
// Fails with kConfig if an option is wrong, and with kInput if an output cannot be written.
// Also fails with the errors of RankWorld and Engine.
int run_bench_matrix(const BenchMatrixOptions& options);

}  // namespace sluice
