// Compares the speed of Adam with the speed of the memory. The update and four yardsticks take
// turns in one process, so that a disturbance affects all of them equally. Thread rule: the
// functions are not thread-safe, so make one measurement at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "cpu_optim/update.h"

namespace sluice {

// A layout of the state, with its name in `sluice bench adam`.
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

// The kind of arrays.
enum class BenchInput : std::uint8_t {
  kPlain,      // the arrays begin at a page
  kUnaligned,  // they begin one element later, so vectors cross cache lines
  kDenormal,   // gradients and moments too small for a normal fp32 number
};

std::string_view name_of(BenchInput input);

// The median and quartiles over the rounds.
struct Spread {
  double median = 0;
  double low = 0;
  double high = 0;
};

struct BenchResult {
  BenchCase state = kBenchCases[0];
  OptimizerState moments = OptimizerState::kFp32;
  unsigned threads = 0;
  std::uint64_t bytes_per_parameter = 0;  // read and written, each counted once
  Spread parameters_per_s;
  Spread update_gb_per_s;
  Spread limit_gb_per_s;    // move_like_update(): the same streams without arithmetic
  Spread percent_of_limit;  // of the ratios within each round
  Spread memcpy_gb_per_s;   // read and written bytes
  Spread triad_gb_per_s;    // the triad of STREAM: a = b + s * c in fp64, 24 bytes per element
};

// The bytes of memory that one measurement takes.
std::uint64_t bench_bytes(const BenchCase& state, std::uint64_t parameters);

struct BenchOptions {
  BenchInput input = BenchInput::kPlain;  // kUnaligned: not with k8bit
  OptimizerState moments = OptimizerState::kFp32;
  std::uint64_t parameters = 0;
  unsigned threads = 0;
  unsigned rounds = 0;
};

// `progress` is called before each round with the round's number, counted from 0.
BenchResult bench_adam(const BenchCase& state, const BenchOptions& options,
                       const std::function<void(unsigned)>& progress);

}  // namespace sluice
