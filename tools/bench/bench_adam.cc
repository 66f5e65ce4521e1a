#include "tools/bench/bench_adam.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "cpu_optim/cpu_optimizer.h"
#include "cpu_optim/worker_arena.h"
#include "tools/report/median.h"

namespace sluice {
namespace {

constexpr std::uint64_t kPieceBytes = 1_MiB;

double seconds_of(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double quantile(const std::vector<double>& sorted, double q) {
  return sorted[static_cast<std::size_t>(q * static_cast<double>(sorted.size() - 1) + 0.5)];
}

Spread spread_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {.median = median(values), .low = quantile(values, 0.25), .high = quantile(values, 0.75)};
}

// The state of one measurement, in place and at rest, with plausible numbers in it.
class Arrays {
 public:
  Arrays(const BenchCase& state, std::uint64_t parameters, const BenchOptions& options)
      : input_(options.input),
        moments_(options.moments),
        first_(parameters * (state.layout == MasterLayout::kFp32 ? 4 : 2), "bench parameters"),
        second_(state.layout == MasterLayout::kFp32 ? 1 : parameters * 4, "bench masters"),
        exp_avg_(parameters * 4, "bench exp_avg"),
        exp_avg_sq_(parameters * 4, "bench exp_avg_sq"),
        exp_avg_scales_(scale_bytes(parameters), "bench scales of exp_avg"),
        exp_avg_sq_scales_(scale_bytes(parameters), "bench scales of exp_avg_sq"),
        gradient_(parameters * size_of(state.gradient), "bench gradients"),
        view_{.master_layout = state.layout,
              .gradient_dtype = state.gradient,
              .parameter = first_.data(),
              .gradient = gradient_.data(),
              .element_count = parameters} {
    if (state.layout == MasterLayout::kSplitBf16)
      view_.low = reinterpret_cast<std::int16_t*>(second_.data());
    if (state.layout == MasterLayout::kFp16)
      view_.master = reinterpret_cast<float*>(second_.data());
    switch (moments_) {
      case OptimizerState::kFp32:
        view_.exp_avg = reinterpret_cast<float*>(exp_avg_.data());
        view_.exp_avg_sq = reinterpret_cast<float*>(exp_avg_sq_.data());
        break;
      case OptimizerState::kBf16:
        view_.exp_avg_bf16 = reinterpret_cast<std::uint16_t*>(exp_avg_.data());
        view_.exp_avg_sq_bf16 = reinterpret_cast<std::uint16_t*>(exp_avg_sq_.data());
        break;
      case OptimizerState::k8bit:
        view_.exp_avg_codes = codes(exp_avg_, exp_avg_scales_);
        view_.exp_avg_sq_codes = codes(exp_avg_sq_, exp_avg_sq_scales_);
        break;
    }
  }

  // Each thread is the first to touch the memory that it will work on. Values that do not fade keep
  // denormals out, or in.
  void fill(WorkerArena& arena) {
    const auto fill_floats = [&](const AlignedBuffer& buffer, float value) {
      for_each_piece(arena, buffer.size_bytes(), [&](std::uint64_t begin, std::uint64_t bytes) {
        std::fill_n(reinterpret_cast<float*>(buffer.data() + begin), bytes / 4, value);
      });
    };
    fill_floats(first_, 0.0f);
    fill_floats(second_, 0.0f);
    const bool is_denormal = input_ == BenchInput::kDenormal;
    // fp32 0.01; the same in bf16, twice; or codes of positive values.
    std::uint32_t moment = 0x3c23d70a;
    if (moments_ == OptimizerState::kBf16) moment = 0x3c233c23;
    if (is_denormal) moment = 0x00010001;
    if (moments_ == OptimizerState::k8bit) moment = 0xc8c8c8c8;
    fill_floats(exp_avg_, float_from_bits(moment));
    fill_floats(exp_avg_sq_, float_from_bits(moment));
    fill_floats(exp_avg_scales_, is_denormal ? float_from_bits(0x00010001) : 0.01f);
    fill_floats(exp_avg_sq_scales_, is_denormal ? float_from_bits(0x00010001) : 0.01f);
    const bool wide = view_.gradient_dtype == DType::kFp32;
    // 0.01, in bf16 too; or a denormal in every type.
    const std::uint32_t gradient = wide ? 0x3c23d70a : 0x3c233c23;
    fill_floats(gradient_, float_from_bits(is_denormal ? 0x00010001 : gradient));
  }

  UpdateArrays view() const {
    const std::uint64_t skipped = input_ == BenchInput::kUnaligned ? 1 : 0;
    return slice(view_, skipped, view_.element_count - 1);
  }

  // memcpy from exp_avg to exp_avg_sq: returns the bytes read and written.
  std::uint64_t copy(WorkerArena& arena) {
    for_each_piece(arena, exp_avg_.size_bytes(), [&](std::uint64_t begin, std::uint64_t bytes) {
      std::memcpy(exp_avg_sq_.data() + begin, exp_avg_.data() + begin, bytes);
    });
    return 2 * exp_avg_.size_bytes();
  }

  // STREAM's triad over thirds of the two moments' arrays: a and b in one, c in the other.
  std::uint64_t triad(WorkerArena& arena) {
    const std::uint64_t count = exp_avg_.size_bytes() / 16 / 64 * 64;
    auto* const a = reinterpret_cast<double*>(exp_avg_.data());
    const auto* const b = a + count;
    const auto* const c = reinterpret_cast<const double*>(exp_avg_sq_.data());
    for_each_piece(arena, count * 8, [&](std::uint64_t begin, std::uint64_t bytes) {
      double* __restrict target = a + begin / 8;
      const double* __restrict left = b + begin / 8;
      const double* __restrict right = c + begin / 8;
      for (std::uint64_t i = 0; i < bytes / 8; ++i) target[i] = left[i] + 3.0 * right[i];
    });
    return 24 * count;
  }

 private:
  template <class Body>
  static void for_each_piece(WorkerArena& arena, std::uint64_t total_bytes, const Body& body) {
    arena.for_each(div_ceil(total_bytes, kPieceBytes), [&](std::uint64_t piece) {
      const std::uint64_t begin = piece * kPieceBytes;
      body(begin, std::min(kPieceBytes, total_bytes - begin));
    });
  }

  static std::uint64_t scale_bytes(std::uint64_t parameters) {
    return div_ceil(parameters, kMomentGroupElements) * sizeof(float);
  }
  static MomentCodes codes(const AlignedBuffer& codes, const AlignedBuffer& scales) {
    return {.codes = reinterpret_cast<std::uint8_t*>(codes.data()),
            .scales = reinterpret_cast<float*>(scales.data())};
  }

  BenchInput input_;
  OptimizerState moments_;
  AlignedBuffer first_;   // what UpdateArrays::parameter is
  AlignedBuffer second_;  // `low` or `master`
  AlignedBuffer exp_avg_;
  AlignedBuffer exp_avg_sq_;
  AlignedBuffer exp_avg_scales_;
  AlignedBuffer exp_avg_sq_scales_;
  AlignedBuffer gradient_;
  UpdateArrays view_;
};

}  // namespace

std::string_view name_of(BenchInput input) {
  switch (input) {
    case BenchInput::kPlain: return "plain";
    case BenchInput::kUnaligned: return "unaligned";
    case BenchInput::kDenormal: return "denormal";
  }
  return "unknown";
}

std::uint64_t bench_bytes(const BenchCase& state, std::uint64_t parameters) {
  const std::uint64_t parameter_bytes = state.layout == MasterLayout::kFp32 ? 4 : 6;
  return parameters * (parameter_bytes + 8 + size_of(state.gradient));
}

BenchResult bench_adam(const BenchCase& state, const BenchOptions& options,
                       const std::function<void(unsigned)>& progress) {
  SLUICE_CHECK(options.parameters > 0 && options.threads > 0 && options.rounds > 0,
               "a benchmark measures something");
  CpuOptimizer optimizer(options.threads);
  WorkerArena arena(options.threads);
  Arrays arrays(state, options.parameters + 1, options);
  const AdamCoefficients coefficients = adam_coefficients({}, 1e-3, 10, 1.0f);
  const UpdateBytes bytes = bytes_per_element(arrays.view());
  BenchResult result;
  result.state = state;
  result.moments = options.moments;
  result.threads = options.threads;
  result.bytes_per_parameter = bytes.read + bytes.write;
  const auto count = static_cast<double>(arrays.view().element_count);
  const double gigabytes = count * static_cast<double>(result.bytes_per_parameter) * 1e-9;
  std::vector<double> rate, update, limit, percent, copy, triad;
  for (unsigned round = 0; round < options.rounds; ++round) {
    progress(round);
    arrays.fill(arena);
    double update_s = 0;
    double limit_s = 0;
    const auto measure_update = [&] {
      update_s = seconds_of([&] { optimizer.update(coefficients, arrays.view()); });
    };
    const auto measure_limit = [&] {
      limit_s = seconds_of([&] { optimizer.move_like_update(arrays.view()); });
    };
    // The first one changes every round.
    if (round % 2 == 0) measure_limit();
    measure_update();
    if (round % 2 != 0) measure_limit();
    std::uint64_t moved_bytes = 0;
    const double copy_s = seconds_of([&] { moved_bytes = arrays.copy(arena); });
    copy.push_back(static_cast<double>(moved_bytes) * 1e-9 / copy_s);
    const double triad_s = seconds_of([&] { moved_bytes = arrays.triad(arena); });
    triad.push_back(static_cast<double>(moved_bytes) * 1e-9 / triad_s);
    rate.push_back(count / update_s);
    update.push_back(gigabytes / update_s);
    limit.push_back(gigabytes / limit_s);
    percent.push_back(100 * limit_s / update_s);
  }
  result.parameters_per_s = spread_of(rate);
  result.update_gb_per_s = spread_of(update);
  result.limit_gb_per_s = spread_of(limit);
  result.percent_of_limit = spread_of(percent);
  result.memcpy_gb_per_s = spread_of(copy);
  result.triad_gb_per_s = spread_of(triad);
  return result;
}

struct UpdateMoves::Work {
  CpuOptimizer optimizer;
  Arrays arrays;
};

UpdateMoves::UpdateMoves(const BenchCase& state, std::uint64_t parameters, unsigned threads)
    : work_(new Work{.optimizer = CpuOptimizer(threads),
                     .arrays = Arrays(state, parameters + 1, BenchOptions{})}) {
  WorkerArena arena(threads);
  work_->arrays.fill(arena);
}

UpdateMoves::~UpdateMoves() = default;

std::uint64_t UpdateMoves::move() {
  const UpdateArrays view = work_->arrays.view();
  work_->optimizer.move_like_update(view);
  const UpdateBytes bytes = bytes_per_element(view);
  return view.element_count * (bytes.read + bytes.write);
}

}  // namespace sluice
