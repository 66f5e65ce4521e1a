// `sluice bench adam` measures the speed of the CPU update, and compares it with the limit of this
// machine's memory, measured in the same run.
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
  unsigned threads = 0;  // 0 = 1, 2, 4 ... up to the granted cores
  std::string json_file;
  std::string plot_file;
  bool quiet = false;
};

// Returns the exit code (tools/cli/exit_codes.h).
// Fails with: kOutOfMemory when the arrays do not fit the machine's memory; kConfig on a wrong
// SLUICE_SIMD, and for 8-bit moments in unaligned arrays; kInput when the JSON file cannot be
// written.
int run_bench_adam(const BenchAdamOptions& options);

}  // namespace sluice
