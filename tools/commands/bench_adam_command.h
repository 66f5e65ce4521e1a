// `sluice bench adam` measures the speed of the CPU update. The memory of the machine sets a limit
// for the speed of the update. The command measures the limit in the same run, and compares the
// speed of the update with the limit.
#pragma once

#include <cstdint>
#include <string>

#include "tools/bench/bench_adam.h"

namespace sluice {

struct BenchAdamOptions {
  std::uint64_t parameters = 100'000'000;
  unsigned rounds = 11;
  BenchInput input = BenchInput::kPlain;
  OptimizerState moments = OptimizerState::kFp32;
  unsigned threads = 0;  // 0 = measure 1, 2, 4 ... threads, up to the granted cores
  std::string json_file;
  std::string plot_file;
  bool quiet = false;
};

// Returns the exit code (tools/cli/exit_codes.h).
// Fails with:
// - kOutOfMemory: the arrays do not fit into the machine's memory.
// - kConfig: SLUICE_SIMD is wrong, or the options combine 8-bit moments with unaligned arrays.
// - kInput: the JSON file cannot be written.
int run_bench_adam(const BenchAdamOptions& options);

}  // namespace sluice
