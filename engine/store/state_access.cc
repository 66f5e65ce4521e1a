#include "engine/store/state_access.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>

namespace sluice {
namespace {

constexpr std::uint64_t kFillElements = 64 << 10;  // a source is asked for at most so many at once

}  // namespace

StateAccess::StateAccess(const Layout& layout, const Placement& placement, const Tiers& tiers,
                         BlockStore& store, Device& device, Scheduler& scheduler)
    : layout_(layout),
      placement_(placement),
      tiers_(tiers),
      store_(store),
      device_(device),
      scheduler_(scheduler),
      stream_(device, "state access") {}

StateAccess::View StateAccess::view_of(const BlockPlace& block) const {
  const std::uint32_t i = index_of(block.id);
  return {.block = block.id,
          .parameters = placement_.parameter_tier[i] == Tier::kHost
                            ? tiers_.host_parameters(block.id)
                            : tiers_.parameter_slot(0),
          .record = placement_.record_tier[i] == Tier::kHost ? tiers_.host_record(block.id)
                                                             : tiers_.lane(0)};
}

const StateAccess::View& StateAccess::load(const BlockPlace& block) {
  if (loaded_ && loaded_->block == block.id) return *loaded_;
  loaded_.reset();
  const View view = view_of(block);
  const std::uint32_t i = index_of(block.id);
  if (placement_.parameter_tier[i] == Tier::kNvme)
    store_.read_now(block.id, Plane::kParameter, view.parameters);
  if (placement_.parameter_tier[i] == Tier::kDevice)
    copy_now(view.parameters, tiers_.device_parameters(block), layout_.parameter_bytes(block.id));
  if (placement_.record_tier[i] == Tier::kNvme)
    store_.read_now(block.id, Plane::kRecord, view.record);
  if (placement_.record_tier[i] == Tier::kDevice)
    copy_now(view.record, tiers_.device_record(block.id), layout_.record_bytes(block.id));
  return loaded_.emplace(view);
}

void StateAccess::store(const View& view) {
  const std::uint32_t i = index_of(view.block);
  const bool is_durable = store_.copies() != nullptr;  // then storage has all of it
  if (placement_.parameter_tier[i] == Tier::kNvme || is_durable)
    store_.write_now(view.block, Plane::kParameter, view.parameters);
  if (placement_.record_tier[i] == Tier::kNvme || (is_durable && !layout_.is_frozen(view.block)))
    store_.write_now(view.block, Plane::kRecord, view.record);
  bring_to_device(view);
}

void StateAccess::copy_now(std::byte* target, const std::byte* source, std::uint64_t size_bytes) {
  device_.copy(target, source, size_bytes, stream_.id());
  device_.synchronize(stream_.id());
}

void StateAccess::restore(StateSource& source) {
  invalidate();
  filled_ = {};
  const std::uint64_t step = source.position().step;
  for (const BlockPlace& block : layout_.blocks()) {
    const View view = view_of(block);
    std::memset(view.parameters, 0, layout_.parameter_bytes(block.id));
    std::memset(view.record, 0, layout_.record_bytes(block.id));
    fill(view, block, source);
    store_.begin_at(block.id, layout_.is_frozen(block.id) ? 0 : step);
    store(view);
    count_homes(block);
  }
}

void StateAccess::open() {
  invalidate();
  filled_ = {};
  for (const BlockPlace& block : layout_.blocks()) {
    const View view = view_of(block);
    const std::uint32_t i = index_of(block.id);
    if (placement_.parameter_tier[i] != Tier::kNvme)
      store_.read_now(block.id, Plane::kParameter, view.parameters);
    if (placement_.record_tier[i] != Tier::kNvme && !layout_.is_frozen(block.id))
      store_.read_now(block.id, Plane::kRecord, view.record);
    bring_to_device(view);
    count_homes(block);
  }
}

void StateAccess::bring_to_device(const View& view) {
  const BlockPlace& block = layout_.block(view.block);
  const std::uint32_t i = index_of(view.block);
  if (placement_.parameter_tier[i] == Tier::kDevice)
    copy_now(tiers_.device_parameters(block), view.parameters, layout_.parameter_bytes(block.id));
  if (placement_.record_tier[i] == Tier::kDevice)
    copy_now(tiers_.device_record(view.block), view.record, layout_.record_bytes(view.block));
}

void StateAccess::lend_homes() {
  scheduler_.run([this] {
    for (std::size_t i = 0; i < kMemoryPools; ++i)
      scheduler_.pools().lend(static_cast<MemoryPool>(i), filled_.pool_bytes[i]);
  });
}

// A unit's home on the device is whole, whatever part of it this rank owns, where the ranks bring
// the rest together there.
void StateAccess::count_homes(const BlockPlace& block) {
  const auto pool_of = [](Tier tier, MemoryPool device, MemoryPool host, MemoryPool nvme) {
    return tier == Tier::kDevice ? device : tier == Tier::kHost ? host : nvme;
  };
  const std::uint32_t i = index_of(block.id);
  const Tier tier = placement_.parameter_tier[i];
  const std::uint64_t parameter_bytes =
      tier != Tier::kDevice ? layout_.parameter_slot_bytes(block.id)
      : i == layout_.unit(block.unit).first_block
          ? align_up(layout_.home_parameter_bytes(block.unit), kStorageAlignBytes)
          : 0;
  filled_.add(pool_of(tier, MemoryPool::kResidentParameters, MemoryPool::kHostParameters,
                      MemoryPool::kNvmeParameters),
              parameter_bytes);
  filled_.add(pool_of(placement_.record_tier[i], MemoryPool::kDeviceRecords,
                      MemoryPool::kHostRecords, MemoryPool::kNvmeRecords),
              layout_.record_slot_bytes(block.id));
}

// Sets the state of every tensor that reaches into `block`; padding stays zero.
void StateAccess::fill(const View& view, const BlockPlace& block, StateSource& source) {
  std::vector<float> run(std::min(kFillElements, block.element_count));
  for (const TensorPlace& tensor : layout_.tensors_of(block.unit)) {
    const std::uint64_t begin = std::max(tensor.offset_elements, block.offset_elements);
    const std::uint64_t end = std::min(tensor.offset_elements + tensor.element_count,
                                       block.offset_elements + block.element_count);
    for (std::uint64_t at = begin; at < end; at += kFillElements) {
      const std::uint64_t count = std::min(kFillElements, end - at);
      const auto values = std::span(run).first(count);
      source.read(tensor, StateKind::kMaster, at - tensor.offset_elements, values);
      if (!layout_.unit(block.unit).is_frozen)
        check_values(tensor, at - tensor.offset_elements, values);
      set_masters(view, at - block.offset_elements, values);
      set_moments(view, tensor, at - tensor.offset_elements, count, source);
    }
  }
}

// Elements [first, first + count) of the tensor, as far as the optimizer keeps moments of it.
void StateAccess::set_moments(const View& view, const TensorPlace& tensor, std::uint64_t first,
                              std::uint64_t count, StateSource& source) const {
  if (layout_.is_frozen(view.block)) return;
  const BlockPlace& block = layout_.block(view.block);
  const std::uint64_t at = tensor.offset_elements + first - block.offset_elements;
  const auto set = [&](StateKind kind, std::uint64_t begin_bytes) {
    auto* const moments =
        reinterpret_cast<float*>(view.record + begin_bytes * block.element_count) + at;
    source.read(tensor, kind, first, {moments, count});
  };
  const StateFormat& format = layout_.format();
  if (format.keeps_exp_avg) set(StateKind::kExpAvg, format.exp_avg_begin_bytes());
  if (format.keeps_exp_avg_sq) set(StateKind::kExpAvgSq, format.exp_avg_sq_begin_bytes());
}

// A value that is not finite would be found one step later, and blamed on the learning rate.
void StateAccess::check_values(const TensorPlace& tensor, std::uint64_t first_element,
                               std::span<const float> values) const {
  const MasterLayout layout = layout_.format().master;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (is_finite_master(layout, values[i])) continue;
    throw Error(ErrorCode::kNonFinite,
                fmt::format("initialize: the value given for \"{}\" (unit \"{}\") at element {} is "
                            "{}, which {} cannot hold as a finite number; look at where the "
                            "values come from",
                            tensor.name, layout_.unit(tensor.unit).name, first_element + i,
                            values[i], name_of(layout_.format().parameter)));
  }
}

// Elements [first, first + values.size()) of the block.
void StateAccess::set_masters(const View& view, std::uint64_t first,
                              std::span<const float> values) const {
  const bool has_record = !layout_.is_frozen(view.block);
  auto* const halves = reinterpret_cast<std::uint16_t*>(view.parameters) + first;
  switch (layout_.format().master) {
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

std::uint64_t StateAccess::element_bytes(StateKind kind) const {
  return kind == StateKind::kParameter ? layout_.format().parameter_bytes() : sizeof(float);
}

void StateAccess::check_read(TensorId id, StateKind kind, std::uint64_t first_element,
                             std::uint64_t size_bytes) const {
  const auto fail = [](const std::string& message) {
    throw Error(ErrorCode::kInvalidArgument, "read_state: " + message);
  };
  if (index_of(id) >= layout_.tensors().size())
    fail(fmt::format("tensor {} does not exist; the model has {}, and ids count from 0",
                     index_of(id), layout_.tensors().size()));
  if (kind > StateKind::kExpAvgSq)
    fail(fmt::format("StateKind {} does not exist", static_cast<int>(kind)));
  const TensorPlace& tensor = layout_.tensor(id);
  const UnitPlace& unit = layout_.unit(tensor.unit);
  if (unit.is_frozen && (kind == StateKind::kExpAvg || kind == StateKind::kExpAvgSq))
    fail(
        fmt::format("\"{}\" has no {}, since its unit \"{}\" is frozen; it has parameters and "
                    "masters",
                    tensor.name, name_of(kind), unit.name));
  if (size_bytes % element_bytes(kind) != 0)
    fail(fmt::format("{} B are no whole number of elements: the {} of \"{}\" takes {} B each",
                     size_bytes, name_of(kind), tensor.name, element_bytes(kind)));
  const std::uint64_t count = size_bytes / element_bytes(kind);
  if (first_element > tensor.element_count || count > tensor.element_count - first_element)
    fail(fmt::format("{} elements from {} on reach beyond the end of \"{}\", which has {}", count,
                     first_element, tensor.name, tensor.element_count));
}

void StateAccess::read(TensorId id, StateKind kind, std::uint64_t first_element,
                       std::span<std::byte> target) {
  const TensorPlace& tensor = layout_.tensor(id);
  const std::uint64_t count = target.size() / element_bytes(kind);
  const std::uint64_t begin = tensor.offset_elements + first_element;
  for (const BlockPlace& block : layout_.blocks_of(tensor.unit)) {
    const std::uint64_t from = std::max(begin, block.offset_elements);
    const std::uint64_t to = std::min(begin + count, block.offset_elements + block.element_count);
    if (from >= to) continue;
    read_block(
        load(block), kind, from - block.offset_elements,
        target.subspan((from - begin) * element_bytes(kind), (to - from) * element_bytes(kind)));
  }
}

// The compute parameters of a frozen block, which are all that it has of a master.
void StateAccess::read_as_masters(const View& view, std::uint64_t begin,
                                  std::span<std::byte> target) const {
  const auto* halves = reinterpret_cast<const std::uint16_t*>(view.parameters) + begin;
  const auto* floats = reinterpret_cast<const float*>(view.parameters) + begin;
  for (std::size_t i = 0; i < target.size() / sizeof(float); ++i) {
    float master = 0;
    switch (layout_.format().parameter) {
      case DType::kFp32: master = floats[i]; break;
      case DType::kBf16: master = float_from_bf16(halves[i]); break;
      case DType::kFp16: master = float_from_fp16(halves[i]); break;
    }
    std::memcpy(target.data() + i * sizeof(float), &master, sizeof(float));
  }
}

void StateAccess::read_block(const View& view, StateKind kind, std::uint64_t begin,
                             std::span<std::byte> target) const {
  const std::uint64_t block_count = layout_.block(view.block).element_count;
  const StateFormat& format = layout_.format();
  const bool has_record = !layout_.is_frozen(view.block);
  // A moment that is not kept reads as zeros.
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
      std::memcpy(target.data(), view.parameters + begin * layout_.format().parameter_bytes(),
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
  if (!has_record) return read_as_masters(view, begin, target);
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
