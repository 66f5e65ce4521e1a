// Products of fp32 row-major matrices: the only file that meets Eigen and BLAS. A product is cut
// into output tiles whose extents depend on the shape of the result alone; each tile is one task
// and one single-threaded BLAS call over the whole inner extent, so that the number of threads
// changes no bit. The bits do depend on the BLAS library and on the kernel it chooses for the
// processor. Pure in their arguments: callable from any thread on disjoint results.
#pragma once

#include <cstdint>
#include <string>

#include "tools/gpt/model/compute_threads.h"

namespace sluice::gpt {

// Element (i, j) is data[i * stride + j]. A view: the memory must outlive the call.
struct ConstMatrix {
  const float* data = nullptr;
  std::uint64_t rows = 0;
  std::uint64_t columns = 0;
  std::uint64_t stride = 0;
};

struct Matrix {
  float* data = nullptr;
  std::uint64_t rows = 0;
  std::uint64_t columns = 0;
  std::uint64_t stride = 0;
};

// What computes the products, and so decides their last bits.
struct MatrixKernels {
  std::string library;  // "OpenBLAS 0.3.21"
  std::string kernels;  // the processor's family, as the library chose it: "SkylakeX"
};
MatrixKernels matrix_kernels();

enum class Form : std::uint8_t {
  kAB,   // A [m, k] * B [k, n]
  kABt,  // A [m, k] * B [n, k] transposed
  kAtB,  // A [k, m] transposed * B [k, n]
};

// What the product is added to; nothing means zero.
struct Addend {
  const float* bias = nullptr;    // [n], added to every row
  const float* matrix = nullptr;  // [m, n] with the stride of the result; may be the result itself
};

// result = addend.matrix + addend.bias + product, in that order.
// Requires: extents match and are below 2^31; `result` does not overlap `a` or `b`.
void multiply(ComputeThreads& threads, Form form, ConstMatrix a, ConstMatrix b, Matrix result,
              Addend addend = {});

// The same as one task on the calling thread, for use inside a task.
void multiply_serial(Form form, ConstMatrix a, ConstMatrix b, Matrix result, Addend addend = {});

}  // namespace sluice::gpt
