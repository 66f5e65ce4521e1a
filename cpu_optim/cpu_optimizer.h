// This class spreads the optimizer's arithmetic over the cores. The arithmetic consists of updates,
// gradient accumulation and the squared norm. Work is divided into chunks that are multiples of the
// norm's leaf, and sums do not depend on their order. So the number of threads does not change the
// results. The object owns a oneTBB arena.
// Thread rule: several threads may call the functions at the same time. Each call blocks until its
// own work is done.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "cpu_optim/gradient_ops.h"
#include "cpu_optim/update.h"

namespace sluice {

class WorkerArena;

// The bytes that an optimizer's functions have read and written. Each access counts.
struct TouchedBytes {
  std::uint64_t update = 0;
  std::uint64_t sum = 0;   // accumulate() and accumulate_with_norm()
  std::uint64_t norm = 0;  // add_squared_norm()
};

class CpuOptimizer {
 public:
  // `threads` is the number of threads that may work at the same time, including the calling
  // thread. The number is at least 1, and at most the number of granted cores (base/topology.h).
  // Fails with kInvalidArgument if `threads` is 0, and with kConfig if SLUICE_SIMD names no
  // available instruction set (update.h).
  explicit CpuOptimizer(unsigned threads);
  ~CpuOptimizer();

  unsigned threads() const;

  // Requires: the distance from the start of the unit to the arrays is a multiple of 16 elements.
  // Chunks then keep their alignment.
  NewState update(const UpdateCoefficients& coefficients, const UpdateArrays& arrays);
  // After this call, all optimizers of this process run update() at a limited rate. An update that
  // is faster than the limit sleeps for the remaining time. The value 0 removes the limit. The
  // limit is for benchmarks that need an exact rate.
  static void set_update_pace(std::uint64_t parameters_per_second) {
    pace_ = parameters_per_second;
  }
  // Divides the arrays into the same chunks as update() does, and calls move_like_update() of
  // update.h on each chunk. So the speeds of both functions can be compared.
  void move_like_update(const UpdateArrays& arrays);
  void accumulate(DType dtype, void* target, const void* source, std::uint64_t element_count);
  void add_squared_norm(DType dtype, const void* gradient, std::uint64_t element_count,
                        NormAccumulator& total);
  // See accumulate_with_norm() of gradient_ops.h.
  void accumulate_with_norm(DType dtype, void* target, const void* source,
                            std::uint64_t element_count, NormAccumulator& total);

  // Returns the bytes that have been touched since the last call.
  TouchedBytes take_touched_bytes() {
    return {.update = update_bytes_.exchange(0),
            .sum = sum_bytes_.exchange(0),
            .norm = norm_bytes_.exchange(0)};
  }

 private:
  static inline std::atomic<std::uint64_t> pace_ = 0;

  std::unique_ptr<WorkerArena> arena_;  // constant after construction
  std::atomic<std::uint64_t> update_bytes_ = 0;
  std::atomic<std::uint64_t> sum_bytes_ = 0;
  std::atomic<std::uint64_t> norm_bytes_ = 0;
};

}  // namespace sluice
