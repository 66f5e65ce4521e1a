#include "engine/detached/detached_work.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <vector>

#include <sluice/dtype.h>
#include <sluice/error.h>
#include <sluice/units.h>
#include "base/moment_rounding.h"
#include "base/optimizer_math.h"
#include "cpu_optim/chunks.h"
#include "cpu_optim/moment_codec.h"

namespace sluice {
namespace {

// The 16 bits that the parameters got last. Null for fp32 parameters.
std::uint16_t* given_of(const DetachedBlock& block, std::byte* record) {
  const bool is_wide = block.format.state.master == MasterLayout::kFp32;
  return is_wide ? nullptr : reinterpret_cast<std::uint16_t*>(record);
}
std::byte* state_of(const DetachedBlock& block, std::byte* record) {
  return record + block.format.state_offset();
}
RecordMoments moments_of(const DetachedBlock& block, std::byte* record) {
  return moments_of(block.format.state, block.format.padded_elements, state_of(block, record));
}

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
  UpdateArrays arrays{.master_layout = block.format.state.master,
                      .element_count = block.element_count};
  arrays.parameter = given_of(block, record);
  if (arrays.master_layout == MasterLayout::kSplitBf16)
    arrays.low = reinterpret_cast<std::int16_t*>(state_of(block, record));
  if (arrays.master_layout == MasterLayout::kFp16)
    arrays.master = reinterpret_cast<float*>(state_of(block, record));
  const RecordMoments moments = moments_of(block, record);
  arrays.exp_avg = moments.exp_avg;
  arrays.exp_avg_sq = moments.exp_avg_sq;
  arrays.exp_avg_bf16 = moments.exp_avg_bf16;
  arrays.exp_avg_sq_bf16 = moments.exp_avg_sq_bf16;
  arrays.exp_avg_codes = moments.exp_avg_codes;
  arrays.exp_avg_sq_codes = moments.exp_avg_sq_codes;
  return arrays;
}

float master_at(const UpdateArrays& arrays, std::uint64_t i) {
  if (arrays.master_layout == MasterLayout::kFp16) return arrays.master[i];
  return join_master({static_cast<const std::uint16_t*>(arrays.parameter)[i], arrays.low[i]});
}

void set_master(const UpdateArrays& arrays, std::uint64_t i, float master) {
  auto* const given = static_cast<std::uint16_t*>(arrays.parameter);
  if (arrays.master_layout == MasterLayout::kFp16) {
    given[i] = fp16_from_float(master);
    arrays.master[i] = master;
    return;
  }
  const SplitMaster split = split_master(master);
  given[i] = split.high;
  arrays.low[i] = split.low;
}

// One moment of a record, in the form that it is kept in. All are null where it is not kept.
struct KeptMoment {
  CodeBook book = CodeBook::kSigned;
  float* values = nullptr;
  std::uint16_t* halves = nullptr;
  MomentCodes codes = {};
};
KeptMoment kept(const DetachedBlock& block, StateKind kind, std::byte* record) {
  const RecordMoments all = moments_of(block, record);
  if (kind == StateKind::kExpAvg)
    return {CodeBook::kSigned, all.exp_avg, all.exp_avg_bf16, all.exp_avg_codes};
  return {CodeBook::kUnsigned, all.exp_avg_sq, all.exp_avg_sq_bf16, all.exp_avg_sq_codes};
}

// Sets values of a moment in codes. Groups of which only a part is set keep the meaning of the
// rest, as far as the codes of their new scale allow it.
void set_codes(const KeptMoment& moment, std::uint64_t element_count, std::uint64_t begin,
               std::span<const float> source) {
  const std::uint64_t first = begin - begin % kMomentGroupElements;
  const std::uint64_t end =
      std::min(align_up(begin + source.size(), kMomentGroupElements), element_count);
  std::vector<float> values(end - first);
  decode_moments(moment.book, moment.codes, first, values);
  std::ranges::copy(source, values.begin() + static_cast<std::ptrdiff_t>(begin - first));
  encode_saved_moments(moment.book, values, moment.codes.from(first));
}

}  // namespace

void make_fresh(const DetachedBlock& block, std::byte* record) {
  const MomentCodes codes = moments_of(block, record).exp_avg_codes;
  if (codes.exist())
    std::memset(codes.codes, zero_code(CodeBook::kSigned), block.format.padded_elements);
}

BlockOutcome update_detached(const DetachedBlock& block, const BlockValues& values,
                             const UpdateCoefficients& coefficients, std::byte* record,
                             WorkerArena& arena) {
  const bool is_wide = block.format.state.master == MasterLayout::kFp32;
  UpdateArrays arrays = arrays_of(block, record);
  if (is_wide) arrays.parameter = values.parameter;
  arrays.gradient_dtype = values.gradient_dtype;
  arrays.gradient = values.gradient;
  arrays.rounding = {.key = rounding_key_of_tensor(values.rounding_key, block.tensor),
                     .first_element = block.first_element};
  std::atomic<std::uint64_t> adopted = 0;
  std::atomic<NewState> state = NewState::kFinite;
  // The bytes of a piece stay in a core's cache while it is compared, updated and copied.
  const std::uint64_t most = chunk_elements(block.element_count, arena.threads());
  arena.for_each(div_ceil(block.element_count, most), [&](std::uint64_t chunk) {
    const std::uint64_t begin = chunk * most;
    const UpdateArrays part = slice(arrays, begin, std::min(most, block.element_count - begin));
    auto* const given = reinterpret_cast<std::uint16_t*>(values.parameter) + begin;
    // Relaxed: the end of the loop orders both before the reads below.
    if (!is_wide && !values.parameter_is_known) {
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
  auto* const readable = const_cast<std::byte*>(record);
  if (kind == StateKind::kMaster) {
    const UpdateArrays arrays = arrays_of(block, readable);
    for (std::uint64_t i = 0; i < target.size(); ++i) target[i] = master_at(arrays, begin + i);
    return;
  }
  if (kind == StateKind::kParameter) {
    const std::uint16_t* const given = given_of(block, readable) + begin;
    const bool is_fp16 = block.format.state.parameter == DType::kFp16;
    for (std::uint64_t i = 0; i < target.size(); ++i)
      target[i] = is_fp16 ? float_from_fp16(given[i]) : float_from_bf16(given[i]);
    return;
  }
  const KeptMoment moment = kept(block, kind, readable);
  if (moment.values != nullptr) {
    std::memcpy(target.data(), moment.values + begin, target.size_bytes());
  } else if (moment.halves != nullptr) {
    std::transform(moment.halves + begin, moment.halves + begin + target.size(), target.begin(),
                   float_from_bf16);
  } else if (moment.codes.exist()) {
    decode_moments(moment.book, moment.codes, begin, target);
  } else {
    std::ranges::fill(target, 0.0f);
  }
}

void write_detached(const DetachedBlock& block, StateKind kind, std::byte* record,
                    std::uint64_t begin, std::span<const float> source) {
  if (kind == StateKind::kMaster) {
    const UpdateArrays arrays = arrays_of(block, record);
    for (std::uint64_t i = 0; i < source.size(); ++i) set_master(arrays, begin + i, source[i]);
    return;
  }
  const KeptMoment moment = kept(block, kind, record);
  if (moment.values != nullptr) {
    std::memcpy(moment.values + begin, source.data(), source.size_bytes());
  } else if (moment.halves != nullptr) {
    std::ranges::transform(source, moment.halves + begin, nearest_moment);
  } else {
    SLUICE_CHECK(moment.codes.exist(), "the facade refuses moments that are not kept");
    set_codes(moment, block.element_count, begin, source);
  }
}

}  // namespace sluice
