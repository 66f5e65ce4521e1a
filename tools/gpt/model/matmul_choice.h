// Which library computes a run's matrix products on the host, and with which kernels: the config's
// run.matmul, made definite by what this machine has. The choice follows from the config, the
// processor and the libraries that are there, never from a measurement at run time.
// Pure, except that oneDNN is opened once (onednn.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <sluice/dtype.h>
#include "tools/gpt/model/onednn.h"

namespace sluice::gpt {

enum class MatrixLibrary : std::uint8_t { kOpenBlas, kOneDnn };
std::string_view name_of(MatrixLibrary library);

// run.matmul: nothing means auto.
struct MatmulWish {
  std::optional<MatrixLibrary> library = {};
  std::optional<KernelFamily> family = {};  // of oneDNN: these kernels and no stronger ones
};
// "auto", "openblas", "onednn", or "onednn-" and the name of a family.
MatmulWish matmul_wish_from(std::string_view name);

// The library that multiplies; the default is always there.
struct MatmulChoice {
  MatrixLibrary library = MatrixLibrary::kOpenBlas;
  // bf16 parameters are multiplied as they are, with activations rounded to bf16; otherwise all
  // factors are widened to fp32.
  bool bf16_factors = false;
};

// Fails with: kUnsupported, naming what there is, when `wish` names a library or kernels that this
// machine lacks.
MatmulChoice choose_matmul(const MatmulWish& wish, DType parameters);

// The library and kernels that compute the products, and so decide their last bits.
struct MatrixKernels {
  std::string library;  // "OpenBLAS 0.3.21", "oneDNN 2.6.3"
  std::string kernels;  // the processor's family, as the library chose it: "SkylakeX", "amx"
  std::string factors;  // "fp32", "bf16"
};
MatrixKernels matrix_kernels(const MatmulChoice& choice);
// "oneDNN 2.6.3, kernels amx, factors bf16"
std::string describe(const MatrixKernels& kernels);

// The gain that oneDNN would bring to a run with `choice`, where it is missing; otherwise empty.
std::string missed_gain(const MatmulWish& wish, const MatmulChoice& choice, DType parameters);

}  // namespace sluice::gpt
