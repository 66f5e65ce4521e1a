#include "base/units.h"

#include <array>
#include <charconv>
#include <cmath>

#include <fmt/format.h>

#include "base/error.h"

namespace sluice {
namespace {

struct SizeUnit {
  std::string_view name;
  double bytes;
};

constexpr std::array<SizeUnit, 10> kSizeUnits{{{"", 1},
                                               {"B", 1},
                                               {"KiB", 1024.0},
                                               {"MiB", 1048576.0},
                                               {"GiB", 1073741824.0},
                                               {"TiB", 1099511627776.0},
                                               {"KB", 1e3},
                                               {"MB", 1e6},
                                               {"GB", 1e9},
                                               {"TB", 1e12}}};

}  // namespace

std::string format_bytes(std::uint64_t bytes) {
  if (bytes < 1024) return fmt::format("{} B", bytes);
  constexpr std::array<const char*, 5> kNames{"KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes) / 1024.0;
  std::size_t name = 0;
  while (value >= 1024.0 && name + 1 < kNames.size()) {
    value /= 1024.0;
    ++name;
  }
  return fmt::format("{:.{}f} {}", value, value < 10.0 ? 2 : (value < 100.0 ? 1 : 0), kNames[name]);
}

std::uint64_t parse_size(std::string_view text) {
  const auto fail = [&](std::string_view why) -> std::uint64_t {
    throw Error(ErrorCode::kConfig, fmt::format("\"{}\" is not a size: {}; write a number with a "
                                                "unit, such as \"64KiB\", \"10MiB\" or \"1.5GiB\"",
                                                text, why));
  };
  double number = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (status != std::errc{} || !std::isfinite(number))
    return fail("it does not start with a number");
  if (number < 0) return fail("it is negative");
  std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  for (const SizeUnit& known : kSizeUnits) {
    if (known.name != unit) continue;
    const double bytes = number * known.bytes;
    if (bytes >= 9.2e18) return fail("it is beyond 8 EiB");
    if (bytes != std::floor(bytes)) return fail("it is not a whole number of bytes");
    return static_cast<std::uint64_t>(bytes);
  }
  return fail(fmt::format("its unit \"{}\" is unknown", unit));
}

}  // namespace sluice
