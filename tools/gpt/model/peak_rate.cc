#include "tools/gpt/model/peak_rate.h"

#include <algorithm>
#include <chrono>

#include "base/aligned_buffer.h"
#include "tools/gpt/model/compute_threads.h"
#include "tools/gpt/model/matmul.h"

namespace sluice::gpt {
namespace {

constexpr std::uint64_t kExtent = 1024;
constexpr std::chrono::milliseconds kMeasuredTime{500};
constexpr int kProductsMin = 3;  // the first one also starts threads and chooses kernels

}  // namespace

double measured_peak_flops(unsigned threads, const MatmulChoice& choice) {
  ComputeThreads workers(threads);
  MatrixProducts products(workers, choice);
  const DType factors = choice.bf16_factors ? DType::kBf16 : DType::kFp32;
  constexpr std::uint64_t kBytes = kExtent * kExtent * sizeof(float);
  const AlignedBuffer a(kBytes, "a factor for measuring the peak rate");
  const AlignedBuffer b(kBytes, "a factor for measuring the peak rate");
  const AlignedBuffer result(kBytes, "the product for measuring the peak rate");
  std::fill_n(a.data(), kBytes, std::byte{0});
  std::fill_n(b.data(), kBytes, std::byte{0});
  const auto factor = [&](const AlignedBuffer& buffer) {
    return ConstMatrix{.data = buffer.data(),
                       .rows = kExtent,
                       .columns = kExtent,
                       .stride = kExtent,
                       .dtype = factors};
  };
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  double best_s = 1e9;
  for (int product = 0; product < kProductsMin || Clock::now() - begin < kMeasuredTime; ++product) {
    const auto start = Clock::now();
    products.multiply(Form::kAB, factor(a), factor(b),
                      {.data = result.data(),
                       .rows = kExtent,
                       .columns = kExtent,
                       .stride = kExtent,
                       .dtype = DType::kFp32});
    best_s = std::min(best_s, std::chrono::duration<double>(Clock::now() - start).count());
  }
  return 2.0 * kExtent * kExtent * kExtent / best_s;
}

}  // namespace sluice::gpt
