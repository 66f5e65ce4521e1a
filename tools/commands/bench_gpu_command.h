// `sluice bench gpu` measures the rates of the GPU. The command also measures the training speed of
// GPT-2 in three sizes. Each size is measured with the state in GPU memory, in host memory and on
// NVMe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

struct BenchGpuOptions {
  std::vector<std::string> shapes;  // empty = 124M, 1.5B, 7B
  std::vector<std::string> places;  // of the state, by their keys; empty = all
  std::string path = "/var/tmp";    // the folder of the storage
  std::uint32_t steps = 3;
  std::uint32_t micro_batches = 1;
  unsigned threads = 0;  // of the optimizer; 0 = as the engine chooses
  double clip_norm = 1;
  double seconds = 300;  // no measurement begins after this time
  std::string json_file;
  std::string plot_file;
};

// Prints a table, and returns the exit code. The command skips each measurement that needs a larger
// machine, and names the skipped measurements in its output.
// Fails with kConfig if an option is wrong, and with kUnsupported if there is no usable GPU. Fails
// with kInput if an output file cannot be written.
int run_bench_gpu(const BenchGpuOptions& options);

}  // namespace sluice
