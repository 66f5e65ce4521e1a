#include "engine/store/block_values.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include <fmt/format.h>

#include <sluice/dtype.h>
#include <sluice/error.h>
#include "base/optimizer_math.h"

namespace sluice {
namespace {

// The most that a source is asked for at once, where the block has no room for more.
constexpr std::uint64_t kFillElements = 256 << 10;

// Looks at every value, so that the compiler compares many at once; a loop that may end early does
// not allow that.
bool all_of(std::span<const float> values, auto is_good) {
  std::uint32_t bad = 0;
  for (const float value : values) bad |= is_good(value) ? 0u : 1u;
  return bad == 0;
}

// An update would spread such a moment to its weight, and the learning rate would be blamed.
void check_moments(const Layout& layout, const TensorPlace& tensor, StateKind kind,
                   std::uint64_t first, std::span<const float> values) {
  const float least = kind == StateKind::kExpAvgSq ? 0 : std::numeric_limits<float>::lowest();
  const auto is_moment = [least](float value) {
    return (value >= least) & (value <= std::numeric_limits<float>::max());
  };
  if (all_of(values, is_moment)) return;
  const auto bad = std::ranges::find_if_not(values, is_moment);
  throw Error(ErrorCode::kNonFinite,
              fmt::format("the {} given for \"{}\" (unit \"{}\") at element {} is {}; it must be "
                          "finite{}; check the source of the state",
                          name_of(kind), tensor.name, layout.unit(tensor.unit).name,
                          first + static_cast<std::uint64_t>(bad - values.begin()), *bad,
                          kind == StateKind::kExpAvgSq ? " and at least 0" : ""));
}

// With kZero, the record is zero but for masters that lie where exp_avg belongs.
enum class NewMoments : std::uint8_t { kFromSource, kZero };

// Elements [first, first + count) of the tensor, for the moments that the optimizer keeps.
void set_moments(const Layout& layout, const BlockView& view, const TensorPlace& tensor,
                 std::uint64_t first, std::uint64_t count, StateSource& source,
                 NewMoments new_moments, std::vector<float>& spare) {
  if (layout.is_frozen(view.block)) return;
  const BlockPlace& block = layout.block(view.block);
  const std::uint64_t at = tensor.offset_elements + first - block.offset_elements;
  const RecordMoments moments = moments_of(layout.format(), block.element_count, view.record);
  const auto read = [&](StateKind kind, std::uint64_t begin, std::span<float> values) {
    source.read(tensor, kind, begin, values);
    check_moments(layout, tensor, kind, begin, values);
  };
  const bool are_zero = new_moments == NewMoments::kZero;
  if (moments.exp_avg != nullptr && are_zero)
    std::fill_n(moments.exp_avg + at, count, 0.0f);
  else if (moments.exp_avg != nullptr)
    read(StateKind::kExpAvg, first, {moments.exp_avg + at, count});
  if (moments.exp_avg_sq != nullptr && !are_zero)
    read(StateKind::kExpAvgSq, first, {moments.exp_avg_sq + at, count});
  const auto set = [&](StateKind kind, CodeBook book, const MomentCodes& codes,
                       std::uint16_t* bf16) {
    if (!codes.exist() && bf16 == nullptr) return;
    for (std::uint64_t done = 0; done < count; done += kFillElements) {
      spare.resize(std::min(kFillElements, count));
      const auto values =
          std::span(spare).first(std::min<std::uint64_t>(spare.size(), count - done));
      read(kind, first + done, values);
      if (codes.exist())
        encode_saved_moments(book, values, codes.from(at + done));
      else
        std::ranges::transform(values, bf16 + at + done, nearest_moment);
    }
  };
  set(StateKind::kExpAvg, CodeBook::kSigned, moments.exp_avg_codes, moments.exp_avg_bf16);
  set(StateKind::kExpAvgSq, CodeBook::kUnsigned, moments.exp_avg_sq_codes, moments.exp_avg_sq_bf16);
}

// Padding has no source. Zero bytes mean zero, except as codes of both signs.
void clear_codes(const Layout& layout, const BlockView& view) {
  if (layout.is_frozen(view.block)) return;
  const std::uint64_t elements = layout.block(view.block).element_count;
  const RecordMoments moments = moments_of(layout.format(), elements, view.record);
  if (moments.exp_avg_codes.exist())
    std::memset(moments.exp_avg_codes.codes, zero_code(CodeBook::kSigned), elements);
}

// A value that is not finite would be noticed a step later, and blamed on the learning rate. In a
// frozen tensor, which no update reaches, infinity is a value like others: masks have it.
void check_values(const Layout& layout, const TensorPlace& tensor, std::uint64_t first_element,
                  std::span<const float> values) {
  const MasterLayout masters = layout.format().master;
  const bool is_frozen = layout.unit(tensor.unit).is_frozen;
  if (all_of(values, [masters](float value) { return is_finite_master(masters, value); })) return;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (is_finite_master(masters, values[i])) continue;
    if (is_frozen && std::isinf(values[i])) continue;
    throw Error(ErrorCode::kNonFinite,
                fmt::format("the value given for \"{}\" (unit \"{}\") at element {} is "
                            "{}, which {} cannot hold as a finite number; check the source of the "
                            "values",
                            tensor.name, layout.unit(tensor.unit).name, first_element + i,
                            values[i], name_of(layout.format().parameter)));
  }
}

// Memory of the block for `count` masters from element `at` of the block on: the masters' own place
// or, if they are split, that of a moment that is set later. Empty if there is none.
std::span<float> room_for_masters(const Layout& layout, const BlockView& view, std::uint64_t at,
                                  std::uint64_t count) {
  const StateFormat& format = layout.format();
  if (format.master == MasterLayout::kFp32)
    return {reinterpret_cast<float*>(view.parameters) + at, count};
  if (layout.is_frozen(view.block)) return {};
  if (format.master == MasterLayout::kFp16)
    return {reinterpret_cast<float*>(view.record) + at, count};
  float* const moments =
      moments_of(format, layout.block(view.block).element_count, view.record).exp_avg;
  if (moments == nullptr) return {};
  return {moments + at, count};
}

// Masters that are already where set_values() reads them to, and zero moments.
class MastersInPlace final : public StateSource {
 public:
  StatePosition position() const override { return {}; }
  void read(const TensorPlace&, StateKind kind, std::uint64_t, std::span<float> values) override {
    if (kind != StateKind::kMaster) std::ranges::fill(values, 0.0f);
  }
};

// The part of the tensor that lies in the block, as elements of the unit.
struct PartInBlock {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;  // at most `begin`: the tensor has no element in the block
};
PartInBlock part_in(const BlockPlace& block, const TensorPlace& tensor) {
  return {.begin = std::max(tensor.offset_elements, block.offset_elements),
          .end = std::min(tensor.offset_elements + tensor.element_count,
                          block.offset_elements + block.element_count)};
}

// The arrays do not overlap; told so, the compiler works on many values at once.
void split_masters(std::span<const float> values, std::uint16_t* __restrict highs,
                   std::int16_t* __restrict lows) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    const SplitMaster split = split_master(values[i]);
    highs[i] = split.high;
    lows[i] = split.low;
  }
}

// `target` may have any alignment.
void join_masters(const std::uint16_t* __restrict highs, const std::int16_t* __restrict lows,
                  std::byte* __restrict target, std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) {
    const float master = join_master({.high = highs[i], .low = lows[i]});
    std::memcpy(target + i * sizeof(float), &master, sizeof(float));
  }
}

// Elements [first, first + values.size()) of the block.
void set_masters(const Layout& layout, const BlockView& view, std::uint64_t first,
                 std::span<const float> values, bool is_opaque) {
  const bool has_record = !layout.is_frozen(view.block);
  auto* const halves = reinterpret_cast<std::uint16_t*>(view.parameters) + first;
  if (is_opaque && layout.format().master != MasterLayout::kFp32) {
    for (std::size_t i = 0; i < values.size(); ++i)
      halves[i] = static_cast<std::uint16_t>(word_of_float(values[i], sizeof *halves));
    return;
  }
  switch (layout.format().master) {
    case MasterLayout::kFp32: return;  // they are in their place
    case MasterLayout::kSplitBf16:
      if (has_record)
        return split_masters(values, halves, reinterpret_cast<std::int16_t*>(view.record) + first);
      for (std::size_t i = 0; i < values.size(); ++i) halves[i] = split_master(values[i]).high;
      return;
    case MasterLayout::kFp16: break;
  }
  for (std::size_t i = 0; i < values.size(); ++i) halves[i] = fp16_from_float(values[i]);
}

// The compute parameters of a frozen block, which serve as its only master.
void read_as_masters(const Layout& layout, const BlockView& view, std::uint64_t begin,
                     std::span<std::byte> target) {
  const bool is_opaque = layout.tensors_of(layout.block(view.block).unit).front().is_opaque;
  const auto* halves = reinterpret_cast<const std::uint16_t*>(view.parameters) + begin;
  const auto* floats = reinterpret_cast<const float*>(view.parameters) + begin;
  for (std::size_t i = 0; i < target.size() / sizeof(float); ++i) {
    float master = 0;
    switch (layout.format().parameter) {
      case DType::kFp32: master = floats[i]; break;
      case DType::kBf16: master = float_from_bf16(halves[i]); break;
      case DType::kFp16:
        master = is_opaque ? float_of_word(halves[i], sizeof *halves) : float_from_fp16(halves[i]);
        break;
    }
    std::memcpy(target.data() + i * sizeof(float), &master, sizeof(float));
  }
}

// A moment that is not kept reads as zero. `target` may have any alignment.
void read_moment(const float* values, const std::uint16_t* bf16, CodeBook book,
                 const MomentCodes& codes, std::uint64_t begin, std::span<std::byte> target) {
  if (values != nullptr) {
    std::memcpy(target.data(), values + begin, target.size());
  } else if (bf16 != nullptr) {
    for (std::uint64_t i = 0; i < target.size() / sizeof(float); ++i) {
      const float value = float_from_bf16(bf16[begin + i]);
      std::memcpy(target.data() + i * sizeof(float), &value, sizeof(float));
    }
  } else if (codes.exist()) {
    std::array<float, 4 * kMomentGroupElements> decoded;
    for (std::uint64_t done = 0; done < target.size() / sizeof(float); done += decoded.size()) {
      const auto part = std::span(decoded).first(
          std::min<std::uint64_t>(decoded.size(), target.size() / sizeof(float) - done));
      decode_moments(book, codes, begin + done, part);
      std::memcpy(target.data() + done * sizeof(float), part.data(), part.size_bytes());
    }
  } else {
    std::memset(target.data(), 0, target.size());
  }
}

void set_all(const Layout& layout, const BlockView& view, StateSource& source,
             NewMoments new_moments) {
  const BlockPlace& block = layout.block(view.block);
  std::vector<float> spare;
  clear_codes(layout, view);
  for (const TensorPlace& tensor : layout.tensors_of(block.unit)) {
    const auto [begin, end] = part_in(block, tensor);
    if (begin >= end) continue;
    for (std::uint64_t at = begin; at < end;) {
      std::span<float> values =
          room_for_masters(layout, view, at - block.offset_elements, end - at);
      if (values.empty()) {
        spare.resize(std::min(kFillElements, block.element_count));
        values = std::span(spare).first(std::min<std::uint64_t>(spare.size(), end - at));
      }
      source.read(tensor, StateKind::kMaster, at - tensor.offset_elements, values);
      if (!tensor.is_opaque) check_values(layout, tensor, at - tensor.offset_elements, values);
      set_masters(layout, view, at - block.offset_elements, values, tensor.is_opaque);
      at += values.size();
    }
    set_moments(layout, view, tensor, begin - tensor.offset_elements, end - begin, source,
                new_moments, spare);
  }
}

}  // namespace

void set_values(const Layout& layout, const BlockView& view, StateSource& source) {
  set_all(layout, view, source, NewMoments::kFromSource);
}

bool read_masters(const Layout& layout, const BlockView& view, StateSource& source) {
  const BlockPlace& block = layout.block(view.block);
  if (room_for_masters(layout, view, 0, 0).data() == nullptr) return false;
  for (const TensorPlace& tensor : layout.tensors_of(block.unit)) {
    const auto [begin, end] = part_in(block, tensor);
    if (begin >= end) continue;
    source.read(tensor, StateKind::kMaster, begin - tensor.offset_elements,
                room_for_masters(layout, view, begin - block.offset_elements, end - begin));
  }
  return true;
}

void set_initial_values(const Layout& layout, const BlockView& view) {
  MastersInPlace source;
  set_all(layout, view, source, NewMoments::kZero);
}

void read_values(const Layout& layout, const BlockView& view, StateKind kind, std::uint64_t begin,
                 std::span<std::byte> target) {
  if (target.empty()) return;  // memcpy() takes no null pointer, even for no bytes
  const std::uint64_t block_count = layout.block(view.block).element_count;
  const StateFormat& format = layout.format();
  const bool has_record = !layout.is_frozen(view.block);
  const RecordMoments moments =
      has_record ? moments_of(format, block_count, view.record) : RecordMoments{};
  switch (kind) {
    case StateKind::kParameter:
      std::memcpy(target.data(), view.parameters + begin * layout.format().parameter_bytes(),
                  target.size());
      return;
    case StateKind::kExpAvg:
      return read_moment(moments.exp_avg, moments.exp_avg_bf16, CodeBook::kSigned,
                         moments.exp_avg_codes, begin, target);
    case StateKind::kExpAvgSq:
      return read_moment(moments.exp_avg_sq, moments.exp_avg_sq_bf16, CodeBook::kUnsigned,
                         moments.exp_avg_sq_codes, begin, target);
    case StateKind::kMaster: break;
  }
  if (!has_record) return read_as_masters(layout, view, begin, target);
  if (format.master != MasterLayout::kSplitBf16) {
    const std::byte* masters = format.master == MasterLayout::kFp32 ? view.parameters : view.record;
    std::memcpy(target.data(), masters + begin * sizeof(float), target.size());
    return;
  }
  join_masters(reinterpret_cast<const std::uint16_t*>(view.parameters) + begin,
               reinterpret_cast<const std::int16_t*>(view.record) + begin, target.data(),
               target.size() / sizeof(float));
}

}  // namespace sluice
