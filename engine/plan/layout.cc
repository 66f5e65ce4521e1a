#include "engine/plan/layout.h"

#include <algorithm>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "cpu_optim/optimizer_options.h"

namespace sluice {
namespace {

constexpr std::uint64_t kBlockElementsMax = 1u << 20;
constexpr std::uint64_t kBlockElementsMin = 16u << 10;
constexpr std::uint64_t kBlocksWanted =
    32;  // fewer would leave the optimizer's pipeline nothing to overlap

std::uint64_t default_block_elements(std::uint64_t element_count) {
  std::uint64_t block = kBlockElementsMax;
  while (block > kBlockElementsMin && element_count / block < kBlocksWanted) block /= 2;
  return block;
}

MasterLayout master_layout_of(DType parameter) {
  switch (parameter) {
    case DType::kFp32: return MasterLayout::kFp32;
    case DType::kBf16: return MasterLayout::kSplitBf16;
    case DType::kFp16: break;
  }
  return MasterLayout::kFp16;
}

}  // namespace

StateFormat state_format(const Config& config) {
  return {.parameter = config.precision.parameters,
          .gradient = config.precision.gradients,
          .master = master_layout_of(config.precision.parameters),
          .keeps_exp_avg = keeps_exp_avg(config.optimizer.kind),
          .keeps_exp_avg_sq = keeps_exp_avg_sq(config.optimizer.kind),
          .moments = config.optimizer.state};
}

RecordMoments moments_of(const StateFormat& format, std::uint64_t elements, std::byte* record) {
  RecordMoments moments;
  std::byte* const exp_avg = record + format.exp_avg_begin(elements);
  std::byte* const exp_avg_sq = record + format.exp_avg_sq_begin(elements);
  if (format.moments == OptimizerState::kFp32) {
    if (format.keeps_exp_avg) moments.exp_avg = reinterpret_cast<float*>(exp_avg);
    if (format.keeps_exp_avg_sq) moments.exp_avg_sq = reinterpret_cast<float*>(exp_avg_sq);
    return moments;
  }
  if (format.moments == OptimizerState::kBf16) {
    if (format.keeps_exp_avg) moments.exp_avg_bf16 = reinterpret_cast<std::uint16_t*>(exp_avg);
    if (format.keeps_exp_avg_sq)
      moments.exp_avg_sq_bf16 = reinterpret_cast<std::uint16_t*>(exp_avg_sq);
    return moments;
  }
  const auto codes = [&](std::byte* begin, std::uint64_t scales_begin) {
    return MomentCodes{.codes = reinterpret_cast<std::uint8_t*>(begin),
                       .scales = reinterpret_cast<float*>(record + scales_begin)};
  };
  if (format.keeps_exp_avg)
    moments.exp_avg_codes = codes(exp_avg, format.exp_avg_scales_begin(elements));
  if (format.keeps_exp_avg_sq)
    moments.exp_avg_sq_codes = codes(exp_avg_sq, format.exp_avg_sq_scales_begin(elements));
  return moments;
}

Layout::Layout(const ModelSpec& model, StateFormat format,
               std::optional<std::uint64_t> block_elements,
               std::span<const std::uint32_t> hyperparameter_sets, Shard shard)
    : format_(format),
      shard_(shard),
      block_elements_(block_elements.value_or(
          default_block_elements(div_ceil(model.element_count(), shard.count)))) {
  for (const UnitSpec& unit : model.units) add_unit(unit);
  for (std::size_t i = 0; i < hyperparameter_sets.size(); ++i)
    tensors_.at(i).hyperparameter_set = hyperparameter_sets[i];
}

void Layout::add_unit(const UnitSpec& spec) {
  UnitPlace unit{.id = UnitId{static_cast<std::uint32_t>(units_.size())},
                 .name = spec.name,
                 .element_count = 0,
                 .payload_elements = 0,
                 .shard_begin = 0,
                 .shard_elements = 0,
                 .first_tensor = static_cast<std::uint32_t>(tensors_.size()),
                 .tensor_count = static_cast<std::uint32_t>(spec.tensors.size()),
                 .first_block = static_cast<std::uint32_t>(blocks_.size()),
                 .block_count = 0,
                 .is_frozen = spec.is_frozen,
                 .is_announced = spec.is_announced,
                 .is_pinned = spec.is_pinned,
                 .is_local = spec.is_local};
  for (const TensorSpec& tensor : spec.tensors) {
    tensors_.push_back({.id = TensorId{static_cast<std::uint32_t>(tensors_.size())},
                        .unit = unit.id,
                        .name = tensor.name,
                        .offset_elements = unit.element_count,
                        .element_count = tensor.element_count(),
                        .is_opaque = spec.is_opaque});
    unit.element_count += align_up(tensor.element_count(), kAlignElements);
    unit.payload_elements += tensor.element_count();
  }
  // Empty tensors need no place. A unit of nothing else has one all the same, of padding.
  unit.element_count = std::max(unit.element_count, kAlignElements);
  parameter_count_ += unit.payload_elements;
  const Shard shard = spec.is_local ? Shard{} : shard_;
  unit.shard_elements =
      align_up(div_ceil(unit.element_count, shard.count), kAlignElements * shard.pieces);
  unit.element_count = unit.shard_elements * shard.count;
  unit.shard_begin = unit.shard_elements * shard.index;
  const std::uint64_t shard_end = unit.shard_begin + unit.shard_elements;
  for (std::uint64_t offset = unit.shard_begin; offset < shard_end; offset += block_elements_) {
    blocks_.push_back({.id = BlockId{static_cast<std::uint32_t>(blocks_.size())},
                       .unit = unit.id,
                       .offset_elements = offset,
                       .element_count = std::min(block_elements_, shard_end - offset)});
  }
  unit.block_count = static_cast<std::uint32_t>(blocks_.size()) - unit.first_block;
  units_.push_back(std::move(unit));
  const bool is_shared = shard.count > 1 && !shard.keeps_all_parameters;
  units_.back().is_sharded = is_shared && !keeps_gathered(units_.back().id);
}

void Layout::fail_id(std::uint32_t index, std::size_t count, const char* kind) {
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} {} does not exist; the model has {}, and ids count from 0", kind,
                          index, count));
}

std::span<const TensorPlace> Layout::tensors_of(UnitId id) const {
  return tensors().subspan(unit(id).first_tensor, unit(id).tensor_count);
}

std::span<const BlockPlace> Layout::blocks_of(UnitId id) const {
  return blocks().subspan(unit(id).first_block, unit(id).block_count);
}

std::uint64_t Layout::state_bytes() const {
  std::uint64_t bytes = 0;
  for (const UnitPlace& unit : units_)
    bytes += unit.shard_elements * format_.parameter_bytes() +
             (unit.is_frozen ? 0 : format_.record_bytes(unit.shard_elements));
  return bytes;
}

std::uint64_t Layout::parameter_bytes(BlockId id) const {
  return block(id).element_count * format_.parameter_bytes();
}

std::uint64_t Layout::record_bytes(BlockId id) const {
  return is_frozen(id) ? 0 : format_.record_bytes(block(id).element_count);
}

std::uint64_t Layout::parameter_slot_bytes(BlockId id) const {
  return align_up(parameter_bytes(id), kStorageAlignBytes);
}

std::uint64_t Layout::record_slot_bytes(BlockId id) const {
  return align_up(record_bytes(id), kStorageAlignBytes);
}

std::uint64_t Layout::gradient_slot_bytes(BlockId id) const {
  return align_up(block(id).element_count * format_.gradient_bytes(), kStorageAlignBytes);
}

std::uint64_t Layout::unit_parameter_bytes(UnitId id) const {
  return unit(id).element_count * format_.parameter_bytes();
}

std::uint64_t Layout::unit_gradient_bytes(UnitId id) const {
  return unit(id).is_frozen ? 0 : unit(id).element_count * format_.gradient_bytes();
}

std::uint64_t Layout::shard_parameter_bytes(UnitId id) const {
  return unit(id).shard_elements * format_.parameter_bytes();
}

std::uint64_t Layout::home_parameter_bytes(UnitId id) const {
  return unit(id).is_sharded ? shard_parameter_bytes(id) : unit_parameter_bytes(id);
}

bool Layout::keeps_gathered(UnitId id) const {
  return shard_.count > 1 && !shard_.keeps_all_parameters && !unit(id).is_local &&
         (unit(id).is_pinned ||
          unit(id).payload_elements * format_.parameter_bytes() <= shard_.keep_gathered_bytes);
}

std::uint64_t Layout::set_gradient_bytes(UnitId id) const {
  return set_elements(id) * format_.gradient_bytes();
}

}  // namespace sluice
