// The benchmark compares the speed of Adam with the speed of the memory. The update and the
// comparison workloads, such as memcpy, run in turns in one process. A disturbance of the machine
// therefore affects the update and the comparison workloads equally.
// Thread rule: not thread-safe. Only one measurement may run at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "cpu_optim/update.h"

namespace sluice {

// A layout of the optimizer state, and the layout's name in `sluice bench adam`.
struct BenchCase {
  std::string_view name;
  MasterLayout layout;
  DType gradient;
};
inline constexpr BenchCase kBenchCases[] = {
    {"fp32", MasterLayout::kFp32, DType::kFp32},
    {"split_bf16", MasterLayout::kSplitBf16, DType::kBf16},
    {"fp16", MasterLayout::kFp16, DType::kFp16},
};

// The kind of arrays that the benchmark updates.
enum class BenchInput : std::uint8_t {
  kPlain,      // the arrays begin at the start of a page
  kUnaligned,  // the arrays begin one element after a page's start, so vectors cross cache lines
  kDenormal,   // gradients and moments are too small for normal fp32 numbers
};

std::string_view name_of(BenchInput input);

// The median and the quartiles of the values that the rounds measured.
struct Spread {
  double median = 0;
  double low = 0;
  double high = 0;
};

struct BenchResult {
  BenchCase state = kBenchCases[0];
  OptimizerState moments = OptimizerState::kFp32;
  unsigned threads = 0;
  std::uint64_t bytes_per_parameter = 0;  // bytes read plus bytes written
  Spread parameters_per_s;
  Spread update_gb_per_s;
  Spread limit_gb_per_s;    // rate of move_like_update(), which has no arithmetic
  Spread percent_of_limit;  // spread of the ratios, one ratio per round
  Spread memcpy_gb_per_s;   // bytes read plus bytes written
  Spread triad_gb_per_s;    // STREAM's triad: a = b + s * c in fp64, 24 bytes per element
};

// The memory that one measurement needs, in bytes.
std::uint64_t bench_bytes(const BenchCase& state, std::uint64_t parameters);

struct BenchOptions {
  BenchInput input = BenchInput::kPlain;  // kUnaligned cannot be combined with k8bit
  OptimizerState moments = OptimizerState::kFp32;
  std::uint64_t parameters = 0;
  unsigned threads = 0;
  unsigned rounds = 0;
};

// Before each round, the function calls `progress` with the number of the round. Rounds are
// numbered from 0.
BenchResult bench_adam(const BenchCase& state, const BenchOptions& options,
                       const std::function<void(unsigned)>& progress);

// Moves the bytes of updates again and again, without arithmetic, to load host memory beside other
// work. Thread rule: one thread at a time.
class UpdateMoves {
 public:
  UpdateMoves(const BenchCase& state, std::uint64_t parameters, unsigned threads);
  ~UpdateMoves();

  // Moves once what an update of all parameters moves. Returns the bytes read plus the bytes
  // written.
  std::uint64_t move();

 private:
  struct Work;
  std::unique_ptr<Work> work_;
};

}  // namespace sluice
