#include "cpu_optim/moment_codec.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <limits>

#include <sluice/error.h>
#include "base/float_environment.h"

namespace sluice {
namespace {

// The upper half of a value's bits, without the sign, selects a cell. A cell of a code book has at
// most one middle between two codes in it, so that one comparison decides. All values below the
// first cell have the codes of that cell.
constexpr std::uint32_t kFirstCell = 0x3400;  // 2^-23
constexpr std::uint32_t kCells = 0x3f80 - kFirstCell + 1;

constexpr float cell_begin(std::uint32_t cell) {
  return cell == 0 ? 0.0f : std::bit_cast<float>((cell + kFirstCell) << 16);
}
// The largest value in a cell. The last cell has only the value 1 in use.
constexpr float cell_last(std::uint32_t cell) {
  if (cell == kCells - 1) return 1.0f;
  return std::bit_cast<float>(((cell + 1 + kFirstCell) << 16) - 1);
}

struct CodeTable {
  CodeKernelTable numbers{};
  std::array<std::uint8_t, 2 * kCells> first{};  // each cell's lowest code; then negative cells
};

// Under the power of ten 10^(i - 6), i from 0 to 6, a code book has 2^i codes of each sign, or
// twice as many without a sign, with equal distances.
constexpr CodeLines make_lines(CodeBook book) {
  CodeLines lines{};
  double power = 1e-6;
  double codes = book == CodeBook::kSigned ? 1 : 2;
  double codes_before = 0;
  for (std::size_t i = 0; i < CodeLines::kCount; ++i) {
    lines.begins[i] = static_cast<float>(power / 10);
    lines.slopes[i] = static_cast<float>(codes / 0.9 / power);
    lines.offsets[i] = static_cast<float>(codes_before - 0.1 * codes / 0.9 + 0.7);
    codes_before += codes;
    codes *= 2;
    power *= 10;
  }
  return lines;
}

constexpr CodeTable make_table(CodeBook book) {
  CodeTable table;
  table.numbers.lines = make_lines(book);
  for (std::uint32_t code = 0; code < 256; ++code) {
    table.numbers.values[code] = code_value(book, code);
    table.numbers.limits[code] = code_book_table(book).limits[code];
  }
  std::uint32_t code = 0;
  for (std::uint32_t cell = kCells; cell-- > 0;) {
    while (-cell_last(cell) > table.numbers.limits[code]) ++code;
    table.first[kCells + cell] = static_cast<std::uint8_t>(code);
  }
  for (std::uint32_t cell = 0; cell < kCells; ++cell) {
    while (cell_begin(cell) > table.numbers.limits[code]) ++code;
    table.first[cell] = static_cast<std::uint8_t>(code);
  }
  return table;
}

// Whether every cell's greatest value has the cell's lowest code or the next one.
constexpr bool has_one_middle_a_cell(const CodeTable& table) {
  for (std::uint32_t cell = 0; cell < kCells; ++cell) {
    const std::uint32_t up = table.first[cell], down = table.first[kCells + cell];
    if (up < 255 && cell_last(cell) > table.numbers.limits[up + 1]) return false;
    if (down < 255 && -cell_begin(cell) > table.numbers.limits[down + 1]) return false;
  }
  return true;
}

constexpr CodeTable kSignedTable = make_table(CodeBook::kSigned);
constexpr CodeTable kUnsignedTable = make_table(CodeBook::kUnsigned);
static_assert(has_one_middle_a_cell(kSignedTable) && has_one_middle_a_cell(kUnsignedTable));

const CodeTable& table_of(CodeBook book) {
  return book == CodeBook::kSigned ? kSignedTable : kUnsignedTable;
}

// nearest_code().
std::uint8_t find_code(const CodeTable& table, float value) {
  const std::uint32_t bits = bits_from_float(value);
  const std::uint32_t cell = std::max((bits & 0x7fffffffu) >> 16, kFirstCell) - kFirstCell;
  const std::uint32_t code = table.first[cell + (bits >> 31) * kCells];
  return static_cast<std::uint8_t>(code + (value > table.numbers.limits[code] ? 1 : 0));
}

// The bits of magnitudes order them. A value that is not finite counts as infinite.
float scale_of(std::span<const float> group) {
  std::int32_t largest = 0;
  for (const float value : group)
    largest = std::max(largest, static_cast<std::int32_t>(bits_from_float(value) & 0x7fffffffu));
  return float_from_bits(std::min(static_cast<std::uint32_t>(largest), 0x7f800000u));
}

void encode_group(CodeBook book, std::span<const float> values, float scale, std::uint8_t* codes) {
  if (scale == 0 || !is_finite_moment(scale)) {
    for (std::size_t i = 0; i < values.size(); ++i)
      codes[i] = encode_moment(book, values[i], scale);
    return;
  }
  const CodeTable& table = table_of(book);
  std::array<float, kMomentGroupElements> ratios;  // apart, so that the divisions are vectors
  for (std::size_t i = 0; i < values.size(); ++i) ratios[i] = values[i] / scale;
  for (std::size_t i = 0; i < values.size(); ++i) codes[i] = find_code(table, ratios[i]);
}

// Calls body(values of a group, its codes, its scale) for each group.
template <class Body>
void for_each_group(std::span<const float> values, const MomentCodes& moment, const Body& body) {
  const FloatEnvironment environment;
  for (std::uint64_t begin = 0; begin < values.size(); begin += kMomentGroupElements) {
    const std::uint64_t count = std::min(kMomentGroupElements, values.size() - begin);
    body(values.subspan(begin, count), moment.codes + begin,
         moment.scales[begin / kMomentGroupElements]);
  }
}

bool means(CodeBook book, std::span<const float> values, const std::uint8_t* codes, float scale) {
  for (std::size_t i = 0; i < values.size(); ++i)
    if (decode_moment(book, codes[i], scale) != values[i]) return false;
  return true;
}

}  // namespace

const CodeKernelTable& code_kernel_table(CodeBook book) {
  return table_of(book).numbers;
}

MomentCodes MomentCodes::from(std::uint64_t begin) const {
  if (!exist()) return {};
  SLUICE_CHECK(begin % kMomentGroupElements == 0, "a run of moments begins with a group");
  return {.codes = codes + begin, .scales = scales + begin / kMomentGroupElements};
}

void encode_moments(CodeBook book, std::span<const float> values, const MomentCodes& moment) {
  for_each_group(values, moment,
                 [&](std::span<const float> group, std::uint8_t* codes, float& scale) {
                   scale = scale_of(group);
                   encode_group(book, group, scale, codes);
                 });
}

void encode_moments_reference(CodeBook book, std::span<const float> values,
                              const MomentCodes& moment) {
  for_each_group(values, moment,
                 [&](std::span<const float> group, std::uint8_t* codes, float& scale) {
                   scale = 0;
                   for (const float value : group) scale = std::max(scale, moment_magnitude(value));
                   for (std::size_t i = 0; i < group.size(); ++i)
                     codes[i] = encode_moment(book, group[i], scale);
                 });
}

void encode_saved_moments(CodeBook book, std::span<const float> values, const MomentCodes& moment) {
  encode_moments(book, values, moment);
  if (book == CodeBook::kUnsigned) return;  // the code of 1 gives the largest magnitude back
  for_each_group(
      values, moment, [&](std::span<const float> group, std::uint8_t* codes, float& scale) {
        const float largest = scale;
        if (!is_finite_moment(largest) || means(book, group, codes, largest)) return;
        // The quotient has an error of one unit in the last place at most.
        const float up = largest / -code_value(book, 0);
        for (const float other : {up, std::nextafter(up, 0.0f), std::nextafter(up, HUGE_VALF)}) {
          if (!is_finite_moment(other) || other < largest) continue;
          encode_group(book, group, other, codes);
          scale = other;
          if (means(book, group, codes, other)) return;
        }
        encode_group(book, group, largest, codes);
        scale = largest;
      });
}

void decode_moments(CodeBook book, const MomentCodes& moment, std::uint64_t begin,
                    std::span<float> values) {
  const FloatEnvironment environment;
  const CodeTable& table = table_of(book);
  for (std::uint64_t at = 0; at < values.size();) {
    const std::uint64_t element = begin + at;
    const std::uint64_t next = (element / kMomentGroupElements + 1) * kMomentGroupElements;
    const std::uint64_t count = std::min<std::uint64_t>(next - element, values.size() - at);
    const float scale = moment.scales[element / kMomentGroupElements];
    const std::uint8_t* const codes = moment.codes + element;
    for (std::uint64_t i = 0; i < count; ++i)
      values[at + i] = table.numbers.values[codes[i]] * scale;
    at += count;
  }
}

}  // namespace sluice
