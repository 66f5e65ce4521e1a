// This class computes products of row-major matrices by OpenBLAS or oneDNN (matmul_choice.h). Only
// matmul.cc includes the headers of Eigen and BLAS. A product is cut into output tiles. The extents
// of the tiles depend only on the shape of the result. Each tile is one task. A task makes one
// single-threaded call of the library for the tile. The inner extent is never split. The number of
// threads therefore does not change the bits of the result. The bits depend on the library, and on
// the kernel that the library chooses for the processor.
// Thread rule: only one call of multiply() may run at a time. Several threads may call
// multiply_serial() at the same time if their results do not overlap.
#pragma once

#include <atomic>
#include <cstdint>

#include <sluice/dtype.h>
#include "base/aligned_buffer.h"
#include "tools/gpt/model/compute_threads.h"
#include "tools/gpt/model/matmul_choice.h"

namespace sluice::gpt {

// Element (i, j) is data[i * stride + j]. A ConstMatrix is a view, so the memory must outlive the
// call.
struct ConstMatrix {
  const void* data = nullptr;
  std::uint64_t rows = 0;
  std::uint64_t columns = 0;
  std::uint64_t stride = 0;
  DType dtype = DType::kFp32;  // or kBf16; both factors have the same type
};

struct Matrix {
  void* data = nullptr;
  std::uint64_t rows = 0;
  std::uint64_t columns = 0;
  std::uint64_t stride = 0;
  DType dtype = DType::kFp32;  // or kBf16: sums are computed in fp32 and rounded once
};

enum class Form : std::uint8_t {
  kAB,   // A [m, k] * B [k, n]
  kABt,  // A [m, k] * B [n, k] transposed
  kAtB,  // A [k, m] transposed * B [k, n]
};

// The values to which the product is added. A null pointer means zero.
struct Addend {
  const float* bias = nullptr;    // [n], added to every row
  const float* matrix = nullptr;  // [m, n] with the stride of the result; may be the result itself
};

// The number of multiply-adds that each library has computed.
struct MatrixWork {
  std::uint64_t openblas = 0;
  std::uint64_t onednn = 0;
};

class MatrixProducts {
 public:
  // `threads` must outlive the object. If `choice` has bf16 factors, the constructor allocates
  // memory for one tile per thread.
  // Fails with kOutOfMemory if there is not enough memory.
  explicit MatrixProducts(ComputeThreads& threads, MatmulChoice choice = {});

  ComputeThreads& threads() const { return threads_; }
  const MatmulChoice& choice() const { return choice_; }
  MatrixWork work() const;

  std::uint64_t scratch_bytes() const { return scratch_.size_bytes(); }
  static std::uint64_t scratch_bytes_of(unsigned threads, const MatmulChoice& choice);

  // result = addend.matrix + addend.bias + product, in that order.
  // Requires: extents match and are below 2^31, and `result` does not overlap `a` or `b`. Factors
  // and results may be bf16 only if choice() has bf16 factors. A bf16 result has no addend.
  void multiply(Form form, ConstMatrix a, ConstMatrix b, Matrix result, Addend addend = {});

  // Does the work of multiply() on the calling thread alone. A task of ComputeThreads may make this
  // call. The result must be fp32.
  void multiply_serial(Form form, ConstMatrix a, ConstMatrix b, Matrix result, Addend addend = {});

 private:
  ComputeThreads& threads_;
  const MatmulChoice choice_;
  AlignedBuffer scratch_;  // a tile in fp32 for each worker
  std::atomic<std::uint64_t> openblas_work_ = 0;
  std::atomic<std::uint64_t> onednn_work_ = 0;
};

}  // namespace sluice::gpt
