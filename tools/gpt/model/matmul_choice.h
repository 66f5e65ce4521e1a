// The functions choose the library and the kernels that compute a run's matrix products on the
// host. The config's run.matmul says what the user wants. The choice follows from the config, the
// processor and the installed libraries. The choice never follows from a measurement at run time.
// The functions are pure, except that the first use of oneDNN opens its library (onednn.h).
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

// The setting run.matmul. Fields without a value mean "auto".
struct MatmulWish {
  std::optional<MatrixLibrary> library = {};
  std::optional<KernelFamily> family = {};  // the strongest kernels of oneDNN that are allowed
};
// The possible names are "auto", "openblas", "onednn", and "onednn-" followed by the name of a
// family.
MatmulWish matmul_wish_from(std::string_view name);

// The library that computes the products. The default library is always available.
struct MatmulChoice {
  MatrixLibrary library = MatrixLibrary::kOpenBlas;
  // If true, bf16 parameters are multiplied without a conversion, and activations are rounded to
  // bf16. If false, all factors are widened to fp32.
  bool bf16_factors = false;
};

// Fails with kUnsupported if `wish` names a library or kernels that this machine lacks. The message
// names the available libraries and kernels.
MatmulChoice choose_matmul(const MatmulWish& wish, DType parameters);

// The library and kernels that compute the products. The library and the kernels decide the last
// bits of the products.
struct MatrixKernels {
  std::string library;  // "OpenBLAS 0.3.21", "oneDNN 2.6.3"
  std::string kernels;  // the processor family that the library chose: "SkylakeX", "amx"
  std::string factors;  // "fp32", "bf16"
};
MatrixKernels matrix_kernels(const MatmulChoice& choice);
// Returns a text such as "oneDNN 2.6.3, kernels amx, factors bf16".
std::string describe(const MatrixKernels& kernels);

// A table in the source code chooses the library for fp32 products. Returns the name of the table
// row from which the choice follows. A row has the name of a family of oneDNN's kernels. For a
// family without a row, the result is "default for " followed by the family's name. The result is
// empty if the table was not used. The table is not used if `wish` names a library, factors are
// bf16, or oneDNN is missing.
std::string table_row(const MatmulWish& wish, const MatmulChoice& choice);

// Says what a run with `choice` would gain from oneDNN if oneDNN is missing, or from newer kernels
// of OpenBLAS if its kernels are older than this processor. Otherwise the result is empty.
std::string missed_gain(const MatmulWish& wish, const MatmulChoice& choice, DType parameters);

}  // namespace sluice::gpt
