#include "cpu_optim/cpu_optimizer.h"

#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <mutex>
#include <thread>

#include <sluice/error.h>
#include <sluice/units.h>
#include "cpu_optim/chunks.h"
#include "cpu_optim/simd_kernels.h"
#include "cpu_optim/worker_arena.h"

namespace sluice {
namespace {

constexpr std::uint64_t kSumAccesses = 3;  // reads the sum and the addend, and writes the sum

// Calls body(begin, count) for each chunk of [0, element_count).
template <class Body>
void for_each_chunk(WorkerArena& arena, std::uint64_t element_count, const Body& body) {
  const std::uint64_t most = chunk_elements(element_count, arena.threads());
  arena.for_each(div_ceil(element_count, most), [&](std::uint64_t chunk) {
    const std::uint64_t begin = chunk * most;
    body(begin, std::min(most, element_count - begin));
  });
}

// Calls add(begin, count, norm) for each chunk of [0, element_count), and adds the norms to
// `total`. The order of merging changes nothing, so one total under a lock suffices: a merge is
// some forty integer additions, and nothing needs to be allocated per chunk.
template <class Add>
void add_norms(WorkerArena& arena, std::uint64_t element_count, NormAccumulator& total,
               const Add& add) {
  std::mutex total_mutex;
  for_each_chunk(arena, element_count, [&](std::uint64_t begin, std::uint64_t count) {
    NormAccumulator part;
    add(begin, count, part);
    const std::lock_guard lock(total_mutex);
    total.merge(part);
  });
}

}  // namespace

CpuOptimizer::CpuOptimizer(unsigned threads) {
  if (threads == 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "CPU optimizer with 0 threads; give it 1 up to the number of granted cores");
  }
  active_simd_kernels();  // so that a wrong SLUICE_SIMD fails here and not inside a step
  arena_ = std::make_unique<WorkerArena>(threads);
}

CpuOptimizer::~CpuOptimizer() = default;

unsigned CpuOptimizer::threads() const {
  return arena_->threads();
}

NewState CpuOptimizer::update(const UpdateCoefficients& coefficients, const UpdateArrays& arrays) {
  const auto began = std::chrono::steady_clock::now();
  const UpdateBytes bytes = bytes_per_element(arrays);
  update_bytes_ += arrays.element_count * (bytes.read + bytes.write);
  std::atomic<NewState> state = NewState::kFinite;
  for_each_chunk(*arena_, arrays.element_count, [&](std::uint64_t begin, std::uint64_t count) {
    // Relaxed: the end of the loop orders it before the read below.
    if (update_simd(coefficients, slice(arrays, begin, count)) == NewState::kNonFinite)
      state.store(NewState::kNonFinite, std::memory_order_relaxed);
  });
  if (const std::uint64_t pace = pace_; pace != 0) {
    ::prctl(PR_SET_TIMERSLACK, 1);  // wakes on time, not up to 50 us later
    const double least_ns =
        static_cast<double>(arrays.element_count) * 1e9 / static_cast<double>(pace);
    std::this_thread::sleep_until(began +
                                  std::chrono::nanoseconds(static_cast<std::int64_t>(least_ns)));
  }
  return state;
}

void CpuOptimizer::move_like_update(const UpdateArrays& arrays) {
  volatile std::uint32_t seed = 0;  // keeps the compiler from seeing that nothing changes
  const std::uint32_t no_change = seed;
  for_each_chunk(*arena_, arrays.element_count, [&](std::uint64_t begin, std::uint64_t count) {
    sluice::move_like_update(slice(arrays, begin, count), no_change);
  });
}

void CpuOptimizer::accumulate(DType dtype, void* target, const void* source,
                              std::uint64_t element_count) {
  sum_bytes_ += kSumAccesses * element_count * size_of(dtype);
  for_each_chunk(*arena_, element_count, [&](std::uint64_t begin, std::uint64_t count) {
    const std::uint64_t begin_bytes = begin * size_of(dtype);
    accumulate_gradient(dtype, static_cast<std::byte*>(target) + begin_bytes,
                        static_cast<const std::byte*>(source) + begin_bytes, count);
  });
}

void CpuOptimizer::add_squared_norm(DType dtype, const void* gradient, std::uint64_t element_count,
                                    NormAccumulator& total) {
  norm_bytes_ += element_count * size_of(dtype);
  add_norms(*arena_, element_count, total,
            [&](std::uint64_t begin, std::uint64_t count, NormAccumulator& norm) {
              sluice::add_squared_norm(
                  dtype, static_cast<const std::byte*>(gradient) + begin * size_of(dtype), count,
                  norm);
            });
}

void CpuOptimizer::accumulate_with_norm(DType dtype, void* target, const void* source,
                                        std::uint64_t element_count, NormAccumulator& total) {
  sum_bytes_ += kSumAccesses * element_count * size_of(dtype);
  add_norms(*arena_, element_count, total,
            [&](std::uint64_t begin, std::uint64_t count, NormAccumulator& norm) {
              const std::uint64_t begin_bytes = begin * size_of(dtype);
              sluice::accumulate_with_norm(dtype, static_cast<std::byte*>(target) + begin_bytes,
                                           static_cast<const std::byte*>(source) + begin_bytes,
                                           count, norm);
            });
}

}  // namespace sluice
