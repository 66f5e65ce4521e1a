// Adam against the memory: adam_simd() and a loop that moves the same bytes in the same shape
// (reads the gradient; reads and writes parameter and both moments; no arithmetic to speak of),
// turn about, in one process. The ratio is what counts: the mover is the limit that the memory
// sets.
//   bench_adam [elements] [rounds]
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "base/aligned_buffer.h"
#include "cpu_optim/cpu_optimizer.h"
#include "cpu_optim/worker_arena.h"

namespace {

using sluice::AlignedBuffer;
using sluice::DType;
using sluice::MasterLayout;

constexpr std::uint64_t kChunkElements = 32 * 1024;

// One stream of `words` 8-byte words. Compiled for each width, like the kernels.
__attribute__((target_clones("avx512f", "avx2", "default"), noinline)) void move_words(
    std::uint64_t* __restrict a, std::uint64_t* __restrict b, std::uint64_t* __restrict c,
    const std::uint64_t* __restrict d, std::uint64_t words) {
  for (std::uint64_t i = 0; i < words; ++i) {
    const std::uint64_t x = d[i];
    a[i] ^= x;
    b[i] ^= x;
    c[i] ^= x;
  }
}

// bf16 parameter, its low half and the gradient are half as wide as the moments: per 8 bytes of a
// moment 4 of each.
__attribute__((target_clones("avx512f", "avx2", "default"), noinline)) void move_split(
    std::uint64_t* __restrict a, std::uint64_t* __restrict b, std::uint32_t* __restrict high,
    std::uint32_t* __restrict low, const std::uint32_t* __restrict d, std::uint64_t words) {
  for (std::uint64_t i = 0; i < words; ++i) {
    const std::uint32_t x = d[i];
    a[i] ^= x;
    b[i] ^= x;
    high[i] ^= x;
    low[i] ^= x;
  }
}

struct Arrays {
  explicit Arrays(std::uint64_t elements)
      : parameter(elements * 4, "parameter"),
        low(elements * 2, "low"),
        exp_avg(elements * 4, "exp_avg"),
        exp_avg_sq(elements * 4, "exp_avg_sq"),
        gradient(elements * 4, "gradient") {}

  AlignedBuffer parameter, low, exp_avg, exp_avg_sq, gradient;
};

template <class T>
T* at(const AlignedBuffer& buffer, std::uint64_t element) {
  return reinterpret_cast<T*>(buffer.data()) + element;
}

void move_like_adam(sluice::WorkerArena& arena, const Arrays& arrays, MasterLayout layout,
                    std::uint64_t elements) {
  arena.for_each(elements / kChunkElements, [&](std::uint64_t chunk) {
    const std::uint64_t words = kChunkElements / 2;
    const std::uint64_t begin = chunk * words;
    auto* const m = at<std::uint64_t>(arrays.exp_avg, begin);
    auto* const v = at<std::uint64_t>(arrays.exp_avg_sq, begin);
    if (layout == MasterLayout::kFp32) {
      move_words(at<std::uint64_t>(arrays.parameter, begin), m, v,
                 at<std::uint64_t>(arrays.gradient, begin), words);
    } else {
      move_split(m, v, at<std::uint32_t>(arrays.parameter, begin),
                 at<std::uint32_t>(arrays.low, begin), at<std::uint32_t>(arrays.gradient, begin),
                 words);
    }
  });
}

template <class Body>
double seconds_of(const Body& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(q * static_cast<double>(values.size() - 1))];
}

void run(unsigned threads, MasterLayout layout, std::uint64_t elements, unsigned rounds) {
  const bool split = layout == MasterLayout::kSplitBf16;
  const Arrays arrays(elements);
  const sluice::AdamArrays adam = {.master_layout = layout,
                                   .gradient_dtype = split ? DType::kBf16 : DType::kFp32,
                                   .parameter = arrays.parameter.data(),
                                   .low = split ? at<std::int16_t>(arrays.low, 0) : nullptr,
                                   .exp_avg = at<float>(arrays.exp_avg, 0),
                                   .exp_avg_sq = at<float>(arrays.exp_avg_sq, 0),
                                   .gradient = arrays.gradient.data(),
                                   .element_count = elements};
  const sluice::AdamCoefficients coefficients = sluice::adam_coefficients({}, 1e-3, 10, 1.0f);
  sluice::CpuOptimizer optimizer(threads);
  sluice::WorkerArena arena(threads);
  std::vector<double> adam_seconds, move_seconds, ratios;
  for (unsigned round = 0; round < rounds; ++round) {
    move_seconds.push_back(seconds_of([&] { move_like_adam(arena, arrays, layout, elements); }));
    // What the mover left is no number worth computing with: zeros keep denormals out.
    for (const AlignedBuffer* buffer :
         {&arrays.parameter, &arrays.low, &arrays.exp_avg, &arrays.exp_avg_sq, &arrays.gradient})
      std::fill_n(buffer->data(), buffer->size_bytes(), std::byte{0});
    adam_seconds.push_back(seconds_of([&] { optimizer.adam(coefficients, adam); }));
    ratios.push_back(move_seconds.back() / adam_seconds.back());
  }
  const double gigabytes = static_cast<double>(elements) * (split ? 26 : 28) * 1e-9;
  fmt::print(
      "{} thread{} {:10} {:7} adam {:5.1f} GB/s  mover {:5.1f} GB/s  adam/mover {:.2f} "
      "[{:.2f}, {:.2f}]\n",
      threads, threads == 1 ? " " : "s", split ? "split bf16" : "fp32", sluice::simd_target_name(),
      gigabytes / quantile(adam_seconds, 0.5), gigabytes / quantile(move_seconds, 0.5),
      quantile(ratios, 0.5), quantile(ratios, 0.25), quantile(ratios, 0.75));
}

}  // namespace

int main(int argc, char** argv) {
  std::uint64_t elements = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 32u << 20;
  const unsigned rounds = argc > 2 ? static_cast<unsigned>(std::strtoul(argv[2], nullptr, 10)) : 15;
  elements = std::max(elements / kChunkElements, std::uint64_t{1}) * kChunkElements;
  fmt::print("{} elements, {} rounds; median [quartiles]\n", elements, rounds);
  for (const unsigned threads : {1u, 2u}) {
    run(threads, MasterLayout::kFp32, elements, rounds);
    run(threads, MasterLayout::kSplitBf16, elements, rounds);
  }
}
