#include <sluice/units.h>

#include <algorithm>
#include <array>
#include <cstddef>

#include <fmt/format.h>

#include <sluice/error.h>

namespace sluice {
namespace {

__extension__ typedef unsigned __int128 Uint128;  // a GNU type, which -Wpedantic wants marked

struct SizeUnit {
  std::string_view name;
  std::uint64_t bytes;
};

constexpr std::array<SizeUnit, 14> kSizeUnits{{{"", 1},
                                               {"B", 1},
                                               {"K", std::uint64_t{1} << 10},
                                               {"M", std::uint64_t{1} << 20},
                                               {"G", std::uint64_t{1} << 30},
                                               {"T", std::uint64_t{1} << 40},
                                               {"KiB", std::uint64_t{1} << 10},
                                               {"MiB", std::uint64_t{1} << 20},
                                               {"GiB", std::uint64_t{1} << 30},
                                               {"TiB", std::uint64_t{1} << 40},
                                               {"KB", 1'000},
                                               {"MB", 1'000'000},
                                               {"GB", 1'000'000'000},
                                               {"TB", 1'000'000'000'000}}};

constexpr std::uint64_t kSizeMax = std::uint64_t{1} << 63;
// Beyond this many digits a fraction of a TiB is no whole number of bytes, or a needlessly long
// zero.
constexpr std::size_t kFractionDigitsMax = 20;

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

bool is_same_word(std::string_view a, std::string_view b) {
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; };
  return std::ranges::equal(a, b, {}, lower, lower);
}

// Removes the digits at the front of `text` and returns them.
std::string_view take_digits(std::string_view& text) {
  std::size_t count = 0;
  while (count < text.size() && is_digit(text[count])) ++count;
  const std::string_view digits = text.substr(0, count);
  text.remove_prefix(count);
  return digits;
}

}  // namespace

std::string format_bytes(std::uint64_t bytes) {
  if (bytes < 1024) return fmt::format("{} B", bytes);
  constexpr std::array<const char*, 5> kNames{"KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes) / 1024.0;
  std::size_t name = 0;
  // 1023.5 and more would print as "1024".
  while (value >= 1023.5 && name + 1 < kNames.size()) {
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
  // In integers: 0.067 * 1e9 in double is no whole number, and 2^53 + 1 bytes would lose the one.
  std::string_view rest = text;
  if (!rest.empty() && rest.front() == '-') return fail("it is negative");
  const std::string_view whole_digits = take_digits(rest);
  if (whole_digits.empty()) return fail("it does not start with a number");
  std::string_view fraction_digits;
  if (!rest.empty() && rest.front() == '.') {
    rest.remove_prefix(1);
    fraction_digits = take_digits(rest);
    if (fraction_digits.empty()) return fail("no digit follows its point");
    if (fraction_digits.size() > kFractionDigitsMax) return fail("its fraction is too long");
  }
  while (!rest.empty() && rest.front() == ' ') rest.remove_prefix(1);
  for (const SizeUnit& unit : kSizeUnits) {
    if (!is_same_word(unit.name, rest)) continue;
    Uint128 whole = 0;
    for (const char digit : whole_digits) {
      whole = whole * 10 + static_cast<unsigned>(digit - '0');
      if (whole > kSizeMax) return fail("it is beyond 8 EiB");
    }
    Uint128 fraction = 0;  // below 10^20 < 2^67; times a TiB below 2^107
    Uint128 fraction_scale = 1;
    for (const char digit : fraction_digits) {
      fraction = fraction * 10 + static_cast<unsigned>(digit - '0');
      fraction_scale *= 10;
    }
    fraction *= unit.bytes;
    if (fraction % fraction_scale != 0) return fail("it is not a whole number of bytes");
    const Uint128 bytes = whole * unit.bytes + fraction / fraction_scale;
    if (bytes > kSizeMax) return fail("it is beyond 8 EiB");
    return static_cast<std::uint64_t>(bytes);
  }
  return fail(fmt::format("its unit \"{}\" is unknown", rest));
}

}  // namespace sluice
