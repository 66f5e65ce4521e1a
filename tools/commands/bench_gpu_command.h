// `sluice bench gpu`: the rates of the GPU, and how fast GPT-2 of three sizes trains on it with its
// state in host memory and on NVMe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

struct BenchGpuOptions {
  std::vector<std::string> shapes;  // empty = 124M, 1.5B, 7B
  std::string path = "/var/tmp";    // of the storage
  std::uint32_t steps = 3;
  double seconds = 300;  // no measurement begins after so many
  std::string json_file;
};

// Prints a table. A measurement that the machine is too small for is named and left out. Returns
// the exit code.
// Fails with: kConfig (an option), kUnsupported (no GPU), kInput.
int run_bench_gpu(const BenchGpuOptions& options);

}  // namespace sluice
