#include "engine/detached/detached_work.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include <sluice/dtype.h>
#include <sluice/error.h>
#include <sluice/units.h>
#include "base/optimizer_math.h"

namespace sluice {
namespace {

template <typename T>
T* array(std::byte* record, std::uint64_t offset_bytes) {
  return reinterpret_cast<T*>(record + offset_bytes);
}
template <typename T>
const T* array(const std::byte* record, std::uint64_t offset_bytes) {
  return reinterpret_cast<const T*>(record + offset_bytes);
}

// Pieces of a block that threads take. The bytes of a piece stay in a core's cache while it is
// compared, updated and copied.
constexpr std::uint64_t kChunkElements = 32 << 10;

// If the application has changed 16-bit parameters since the last update, their values become the
// masters. Returns how many. `part` has the values of the last update.
std::uint64_t adopt(const std::uint16_t* parameter, const UpdateArrays& part) {
  auto* const given = static_cast<std::uint16_t*>(part.parameter);
  if (std::memcmp(given, parameter, part.element_count * sizeof *given) == 0) return 0;
  std::uint64_t changed = 0;
  for (std::uint64_t i = 0; i < part.element_count; ++i) {
    if (given[i] == parameter[i]) continue;
    ++changed;
    given[i] = parameter[i];
    if (part.master_layout == MasterLayout::kSplitBf16) {
      part.low[i] = 0;
    } else {
      part.master[i] = float_from_fp16(parameter[i]);
    }
  }
  return changed;
}

UpdateArrays arrays_of(const DetachedBlock& block, std::byte* record) {
  const RecordFormat& format = block.format;
  UpdateArrays arrays{.master_layout = format.layout, .element_count = block.element_count};
  if (format.layout != MasterLayout::kFp32) arrays.parameter = record + format.given_offset();
  if (format.layout == MasterLayout::kSplitBf16)
    arrays.low = array<std::int16_t>(record, format.low_offset());
  if (format.layout == MasterLayout::kFp16)
    arrays.master = array<float>(record, format.low_offset());
  if (format.has_exp_avg) arrays.exp_avg = array<float>(record, format.exp_avg_offset());
  if (format.has_exp_avg_sq) arrays.exp_avg_sq = array<float>(record, format.exp_avg_sq_offset());
  return arrays;
}

float master_at(const RecordFormat& format, const std::byte* record, std::uint64_t i) {
  const std::uint16_t given = array<std::uint16_t>(record, format.given_offset())[i];
  if (format.layout == MasterLayout::kFp16) return array<float>(record, format.low_offset())[i];
  return join_master({given, array<std::int16_t>(record, format.low_offset())[i]});
}

void set_master(const RecordFormat& format, std::byte* record, std::uint64_t i, float master) {
  auto& given = array<std::uint16_t>(record, format.given_offset())[i];
  if (format.layout == MasterLayout::kFp16) {
    given = fp16_from_float(master);
    array<float>(record, format.low_offset())[i] = master;
    return;
  }
  const SplitMaster split = split_master(master);
  given = split.high;
  array<std::int16_t>(record, format.low_offset())[i] = split.low;
}

// The array of a moment; null where the record has none.
std::byte* moment(const RecordFormat& format, StateKind kind, std::byte* record) {
  if (kind == StateKind::kExpAvg && format.has_exp_avg) return record + format.exp_avg_offset();
  if (kind == StateKind::kExpAvgSq && format.has_exp_avg_sq)
    return record + format.exp_avg_sq_offset();
  return nullptr;
}

}  // namespace

BlockOutcome update_detached(const DetachedBlock& block, const BlockValues& values,
                             const UpdateCoefficients& coefficients, std::byte* record,
                             WorkerArena& arena) {
  const bool is_wide = block.format.layout == MasterLayout::kFp32;
  UpdateArrays arrays = arrays_of(block, record);
  if (is_wide) arrays.parameter = values.parameter;
  arrays.gradient_dtype = values.gradient_dtype;
  arrays.gradient = values.gradient;
  std::atomic<std::uint64_t> adopted = 0;
  std::atomic<NewState> state = NewState::kFinite;
  arena.for_each(div_ceil(block.element_count, kChunkElements), [&](std::uint64_t chunk) {
    const std::uint64_t begin = chunk * kChunkElements;
    const UpdateArrays part =
        slice(arrays, begin, std::min(kChunkElements, block.element_count - begin));
    auto* const given = reinterpret_cast<std::uint16_t*>(values.parameter) + begin;
    // Relaxed: the end of the loop orders both before the reads below.
    if (!is_wide) {
      if (const std::uint64_t changed = adopt(given, part); changed != 0)
        adopted.fetch_add(changed, std::memory_order_relaxed);
    }
    if (update_simd(coefficients, part) == NewState::kNonFinite)
      state.store(NewState::kNonFinite, std::memory_order_relaxed);
    if (!is_wide) std::memcpy(given, part.parameter, part.element_count * sizeof *given);
  });
  return {.adopted_elements = adopted, .state = state};
}

void read_detached(const DetachedBlock& block, StateKind kind, const std::byte* record,
                   std::uint64_t begin, std::span<float> target) {
  const RecordFormat& format = block.format;
  for (std::uint64_t i = 0; i < target.size() && kind == StateKind::kMaster; ++i)
    target[i] = master_at(format, record, begin + i);
  if (kind == StateKind::kMaster) return;
  if (kind == StateKind::kParameter) {
    const auto* const given = array<std::uint16_t>(record, format.given_offset()) + begin;
    for (std::uint64_t i = 0; i < target.size(); ++i)
      target[i] = format.layout == MasterLayout::kFp16 ? float_from_fp16(given[i])
                                                       : float_from_bf16(given[i]);
    return;
  }
  const std::byte* const values = moment(format, kind, const_cast<std::byte*>(record));
  if (values == nullptr) {
    std::ranges::fill(target, 0.0f);
  } else {
    std::memcpy(target.data(), values + begin * sizeof(float), target.size_bytes());
  }
}

void write_detached(const DetachedBlock& block, StateKind kind, std::byte* record,
                    std::uint64_t begin, std::span<const float> source) {
  const RecordFormat& format = block.format;
  if (kind == StateKind::kMaster) {
    for (std::uint64_t i = 0; i < source.size(); ++i)
      set_master(format, record, begin + i, source[i]);
    return;
  }
  std::byte* const values = moment(format, kind, record);
  SLUICE_CHECK(values != nullptr, "the facade refuses moments that are not kept");
  std::memcpy(values + begin * sizeof(float), source.data(), source.size_bytes());
}

}  // namespace sluice
