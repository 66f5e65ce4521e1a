#include <cctype>
#include <cstdlib>
#include <string>

#include <fmt/format.h>

#include "base/error.h"
#include "cpu_optim/simd_kernels.h"

namespace sluice {
namespace {

bool equal_ignoring_case(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::tolower(static_cast<unsigned char>(a[i])) !=
        std::tolower(static_cast<unsigned char>(b[i])))
      return false;
  }
  return true;
}

}  // namespace

const SimdKernels& select_simd_kernels(std::string_view name) {
  const std::span<const SimdKernels> available = available_simd_kernels();
  if (name.empty()) return available.front();
  std::string names;
  for (const SimdKernels& kernels : available) {
    if (equal_ignoring_case(kernels.target_name, name)) return kernels;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", kernels.target_name);
  }
  throw Error(ErrorCode::kConfig,
              fmt::format("SLUICE_SIMD is \"{}\", an instruction set that this build or this "
                          "processor lacks; unset it or set it to one of: {}",
                          name, names));
}

const SimdKernels& active_simd_kernels() {
  static const SimdKernels& kernels = [&]() -> const SimdKernels& {
    const char* forced = std::getenv("SLUICE_SIMD");
    return select_simd_kernels(forced == nullptr ? "" : forced);
  }();
  return kernels;
}

std::string_view simd_target_name() {
  return active_simd_kernels().target_name;
}

}  // namespace sluice
