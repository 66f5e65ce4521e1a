#include "engine/store/block_values.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include <fmt/format.h>

#include <sluice/dtype.h>
#include <sluice/error.h>
#include "base/optimizer_math.h"

namespace sluice {
namespace {

constexpr std::uint64_t kFillElements = 64 << 10;  // the most that a source is asked for at once

// Elements [first, first + count) of the tensor, for the moments that the optimizer keeps.
void set_moments(const Layout& layout, const BlockView& view, const TensorPlace& tensor,
                 std::uint64_t first, std::uint64_t count, StateSource& source) {
  if (layout.is_frozen(view.block)) return;
  const BlockPlace& block = layout.block(view.block);
  const std::uint64_t at = tensor.offset_elements + first - block.offset_elements;
  const auto set = [&](StateKind kind, std::uint64_t begin_bytes) {
    auto* const moments =
        reinterpret_cast<float*>(view.record + begin_bytes * block.element_count) + at;
    source.read(tensor, kind, first, {moments, count});
  };
  const StateFormat& format = layout.format();
  if (format.keeps_exp_avg) set(StateKind::kExpAvg, format.exp_avg_begin_bytes());
  if (format.keeps_exp_avg_sq) set(StateKind::kExpAvgSq, format.exp_avg_sq_begin_bytes());
}

// A value that is not finite would be noticed a step later, and blamed on the learning rate.
void check_values(const Layout& layout, const TensorPlace& tensor, std::uint64_t first_element,
                  std::span<const float> values) {
  const MasterLayout masters = layout.format().master;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (is_finite_master(masters, values[i])) continue;
    throw Error(ErrorCode::kNonFinite,
                fmt::format("initialize: the value given for \"{}\" (unit \"{}\") at element {} is "
                            "{}, which {} cannot hold as a finite number; check the source of the "
                            "values",
                            tensor.name, layout.unit(tensor.unit).name, first_element + i,
                            values[i], name_of(layout.format().parameter)));
  }
}

// Elements [first, first + values.size()) of the block.
void set_masters(const Layout& layout, const BlockView& view, std::uint64_t first,
                 std::span<const float> values) {
  const bool has_record = !layout.is_frozen(view.block);
  auto* const halves = reinterpret_cast<std::uint16_t*>(view.parameters) + first;
  switch (layout.format().master) {
    case MasterLayout::kFp32:
      std::memcpy(reinterpret_cast<float*>(view.parameters) + first, values.data(),
                  values.size_bytes());
      return;
    case MasterLayout::kSplitBf16:
      for (std::size_t i = 0; i < values.size(); ++i) {
        const SplitMaster split = split_master(values[i]);
        halves[i] = split.high;
        if (has_record) reinterpret_cast<std::int16_t*>(view.record)[first + i] = split.low;
      }
      return;
    case MasterLayout::kFp16: break;
  }
  if (has_record)
    std::memcpy(reinterpret_cast<float*>(view.record) + first, values.data(), values.size_bytes());
  for (std::size_t i = 0; i < values.size(); ++i) halves[i] = fp16_from_float(values[i]);
}

// The compute parameters of a frozen block, which serve as its only master.
void read_as_masters(const Layout& layout, const BlockView& view, std::uint64_t begin,
                     std::span<std::byte> target) {
  const auto* halves = reinterpret_cast<const std::uint16_t*>(view.parameters) + begin;
  const auto* floats = reinterpret_cast<const float*>(view.parameters) + begin;
  for (std::size_t i = 0; i < target.size() / sizeof(float); ++i) {
    float master = 0;
    switch (layout.format().parameter) {
      case DType::kFp32: master = floats[i]; break;
      case DType::kBf16: master = float_from_bf16(halves[i]); break;
      case DType::kFp16: master = float_from_fp16(halves[i]); break;
    }
    std::memcpy(target.data() + i * sizeof(float), &master, sizeof(float));
  }
}

}  // namespace

void set_values(const Layout& layout, const BlockView& view, StateSource& source) {
  const BlockPlace& block = layout.block(view.block);
  std::vector<float> run(std::min(kFillElements, block.element_count));
  for (const TensorPlace& tensor : layout.tensors_of(block.unit)) {
    const std::uint64_t begin = std::max(tensor.offset_elements, block.offset_elements);
    const std::uint64_t end = std::min(tensor.offset_elements + tensor.element_count,
                                       block.offset_elements + block.element_count);
    for (std::uint64_t at = begin; at < end; at += kFillElements) {
      const std::uint64_t count = std::min(kFillElements, end - at);
      const auto values = std::span(run).first(count);
      source.read(tensor, StateKind::kMaster, at - tensor.offset_elements, values);
      if (!layout.unit(block.unit).is_frozen)
        check_values(layout, tensor, at - tensor.offset_elements, values);
      set_masters(layout, view, at - block.offset_elements, values);
      set_moments(layout, view, tensor, at - tensor.offset_elements, count, source);
    }
  }
}

void read_values(const Layout& layout, const BlockView& view, StateKind kind, std::uint64_t begin,
                 std::span<std::byte> target) {
  const std::uint64_t block_count = layout.block(view.block).element_count;
  const StateFormat& format = layout.format();
  const bool has_record = !layout.is_frozen(view.block);
  // A moment that is not kept reads as zero.
  const auto read_moment = [&](bool is_kept, std::uint64_t begin_bytes) {
    if (is_kept && has_record) {
      const std::byte* moment = view.record + begin_bytes * block_count + begin * sizeof(float);
      std::memcpy(target.data(), moment, target.size());
    } else {
      std::memset(target.data(), 0, target.size());
    }
  };
  switch (kind) {
    case StateKind::kParameter:
      std::memcpy(target.data(), view.parameters + begin * layout.format().parameter_bytes(),
                  target.size());
      return;
    case StateKind::kExpAvg:
      read_moment(format.keeps_exp_avg, format.exp_avg_begin_bytes());
      return;
    case StateKind::kExpAvgSq:
      read_moment(format.keeps_exp_avg_sq, format.exp_avg_sq_begin_bytes());
      return;
    case StateKind::kMaster: break;
  }
  if (!has_record) return read_as_masters(layout, view, begin, target);
  if (format.master != MasterLayout::kSplitBf16) {
    const std::byte* masters = format.master == MasterLayout::kFp32 ? view.parameters : view.record;
    std::memcpy(target.data(), masters + begin * sizeof(float), target.size());
    return;
  }
  const auto* high = reinterpret_cast<const std::uint16_t*>(view.parameters) + begin;
  const auto* low = reinterpret_cast<const std::int16_t*>(view.record) + begin;
  for (std::size_t i = 0; i < target.size() / sizeof(float); ++i) {
    const float master = join_master({.high = high[i], .low = low[i]});
    std::memcpy(target.data() + i * sizeof(float), &master, sizeof(float));
  }
}

}  // namespace sluice
