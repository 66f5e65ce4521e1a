#include "gpu/cuda/cuda_architectures.h"

#include <charconv>
#include <cstddef>
#include <system_error>

namespace sluice {
namespace {

// `name` is one architecture.
bool runs(std::string_view name, int major, int minor) {
  int compiled = 0;
  const char* const end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(name.data(), end, compiled);
  if (error != std::errc()) return true;
  std::string_view kind(rest, end);
  const bool is_exact = kind.starts_with('a');
  const bool is_family = kind.starts_with('f');
  if (is_exact || is_family) kind.remove_prefix(1);
  if (!kind.empty() && kind != "-real" && kind != "-virtual") return true;
  const int found = 10 * major + minor;
  if (is_exact) return found == compiled;
  const bool is_same_major = major == compiled / 10;
  return found >= compiled && (is_same_major || (!is_family && kind != "-real"));
}

}  // namespace

std::string_view compiled_cuda_architectures() {
  return SLUICE_CUDA_ARCHITECTURES;
}

bool runs_on_capability(std::string_view architectures, int major, int minor) {
  constexpr std::string_view kBetween = ", ";
  while (true) {
    const std::size_t end = architectures.find(kBetween);
    if (runs(architectures.substr(0, end), major, minor)) return true;
    if (end == std::string_view::npos) return false;
    architectures.remove_prefix(end + kBetween.size());
  }
}

}  // namespace sluice
