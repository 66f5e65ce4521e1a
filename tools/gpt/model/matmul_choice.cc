#include "tools/gpt/model/matmul_choice.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include <sluice/error.h>

extern "C" char* openblas_get_config();
extern "C" char* openblas_get_corename();

namespace sluice::gpt {
namespace {

constexpr std::string_view kOneDnnPrefix = "onednn-";

// The library for fp32 products by what its kernels are written for; rows that are missing take the
// default. One thread, tiles of 64 to 128 rows and 64 to 512 columns (docs/results/training.md):
// oneDNN 2.6.3 160 to 190 GFLOP/s, OpenBLAS 0.3.21 105 to 160 on an Intel Xeon with AMX.
struct TableRow {
  KernelFamily family;
  MatrixLibrary fp32;
};
constexpr std::array<TableRow, 2> kTable = {{{KernelFamily::kAmx, MatrixLibrary::kOneDnn},
                                             {KernelFamily::kAvx512Bf16, MatrixLibrary::kOneDnn}}};
constexpr MatrixLibrary kDefaultRow = MatrixLibrary::kOpenBlas;

const TableRow* row_of(KernelFamily family) {
  const auto* const row = std::ranges::find(kTable, family, &TableRow::family);
  return row == kTable.end() ? nullptr : row;
}

MatrixLibrary fp32_library(KernelFamily family) {
  const TableRow* const row = row_of(family);
  return row == nullptr ? kDefaultRow : row->fp32;
}

bool multiplies_bf16(KernelFamily family) {
  return family >= KernelFamily::kAvx512Bf16;
}

[[noreturn]] void refuse(std::string_view wish, const std::string& why) {
  throw Error(ErrorCode::kUnsupported,
              fmt::format("run.matmul is \"{}\": {}; \"auto\" takes what there is", wish, why));
}

void require_library(std::string_view wish) {
  if (const std::string& why = OneDnn::library().why_not(); !why.empty())
    refuse(wish, fmt::format("oneDNN cannot be used: {}; install Debian's libdnnl2, or name the "
                             "library by SLUICE_ONEDNN",
                             why));
}

// The limit comes first: once the library has been asked for its strongest kernels, it takes no
// limit.
void require_family(std::string_view wish, KernelFamily family) {
  OneDnn& library = OneDnn::library();
  if (!library.limit(family))
    refuse(wish, fmt::format("oneDNN {} is at {} kernels already, and takes a limit once in a "
                             "process",
                             library.version(), name_of(library.family())));
  if (library.family() != family)
    refuse(wish,
           fmt::format("oneDNN {} has kernels up to {} here; the processor goes up to {}, "
                       "and ONEDNN_MAX_CPU_ISA may hold it back",
                       library.version(), name_of(library.family()), name_of(processor_family())));
}

// A release of OpenBLAS takes a processor that is newer than itself for one without AVX2.
std::string old_kernels(const MatmulChoice& choice, KernelFamily family) {
  constexpr std::array<std::string_view, 8> kWithoutAvx2 = {
      "Prescott", "Core2", "Penryn", "Dunnington", "Nehalem", "Sandybridge", "Barcelona", "Bobcat"};
  const MatrixKernels found = matrix_kernels(choice);
  if (family < KernelFamily::kAvx2 ||
      std::ranges::find(kWithoutAvx2, found.kernels) == kWithoutAvx2.end())
    return {};
  return fmt::format(
      "{} uses old kernels ({}), for processors without AVX2, and this one has {}; set the "
      "environment variable OPENBLAS_CORETYPE={} for matrix products several times as fast, whose "
      "last bits differ",
      found.library, found.kernels, name_of(family),
      family == KernelFamily::kAvx2 ? "Haswell" : "SkylakeX");
}

std::string text_of(const MatmulWish& wish) {
  if (!wish.library) return "auto";
  if (wish.family) return fmt::format("{}{}", kOneDnnPrefix, name_of(*wish.family));
  return std::string(name_of(*wish.library));
}

}  // namespace

std::string_view name_of(MatrixLibrary library) {
  return library == MatrixLibrary::kOneDnn ? "onednn" : "openblas";
}

MatmulWish matmul_wish_from(std::string_view name) {
  if (name == "openblas") return {.library = MatrixLibrary::kOpenBlas};
  if (name == "onednn") return {.library = MatrixLibrary::kOneDnn};
  if (!name.starts_with(kOneDnnPrefix)) return {};
  return {.library = MatrixLibrary::kOneDnn,
          .family = kernel_family_from(name.substr(kOneDnnPrefix.size()))};
}

MatmulChoice choose_matmul(const MatmulWish& wish, DType parameters) {
  if (wish.library == MatrixLibrary::kOpenBlas) return {};
  const OneDnn& library = OneDnn::library();
  if (wish.library) {
    require_library(text_of(wish));
    if (wish.family) require_family(text_of(wish), *wish.family);
  } else if (!library.why_not().empty()) {
    return {};
  }
  const KernelFamily family = library.family();
  const bool bf16 = parameters == DType::kBf16 && multiplies_bf16(family);
  if (bf16) return {.library = MatrixLibrary::kOneDnn, .bf16_factors = true};
  return {.library = wish.library.value_or(fp32_library(family))};
}

MatrixKernels matrix_kernels(const MatmulChoice& choice) {
  if (choice.library == MatrixLibrary::kOneDnn) {
    const OneDnn& library = OneDnn::library();
    return {.library = "oneDNN " + library.version(),
            .kernels = std::string(name_of(library.family())),
            .factors = choice.bf16_factors ? "bf16" : "fp32"};
  }
  // "OpenBLAS 0.3.21 NO_LAPACKE DYNAMIC_ARCH ..."
  const std::string build = openblas_get_config();
  const std::size_t name = build.find(' ');
  return {.library = build.substr(0, build.find(' ', std::min(name, build.size() - 1) + 1)),
          .kernels = openblas_get_corename(),
          .factors = "fp32"};
}

std::string describe(const MatrixKernels& kernels) {
  return fmt::format("{}, kernels {}, factors {}", kernels.library, kernels.kernels,
                     kernels.factors);
}

std::string table_row(const MatmulWish& wish, const MatmulChoice& choice) {
  const OneDnn& library = OneDnn::library();
  if (wish.library || choice.bf16_factors || !library.why_not().empty()) return {};
  const std::string family(name_of(library.family()));
  return row_of(library.family()) == nullptr ? "default for " + family : family;
}

std::string missed_gain(const MatmulWish& wish, const MatmulChoice& choice, DType parameters) {
  if (choice.library == MatrixLibrary::kOneDnn) return {};
  const OneDnn& library = OneDnn::library();
  const KernelFamily family = processor_family();
  const bool bf16 = parameters == DType::kBf16 && multiplies_bf16(family);
  const bool gains = bf16 || fp32_library(family) == MatrixLibrary::kOneDnn;
  if (wish.library || library.why_not().empty() || !gains) return old_kernels(choice, family);
  return fmt::format(
      "matrix products could be about {} times as fast by oneDNN, which has {} kernels for this "
      "processor; it is not used: {} (install Debian's libdnnl2)",
      bf16 ? family == KernelFamily::kAmx ? "5" : "2" : "1.2", name_of(family), library.why_not());
}

}  // namespace sluice::gpt
