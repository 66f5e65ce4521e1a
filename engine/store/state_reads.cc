// The part of StateAccess that gives ranges of the state to the application.
#include <algorithm>

#include <fmt/format.h>

#include <sluice/error.h>
#include "engine/store/state_access.h"

namespace sluice {

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
        fmt::format("\"{}\" has no {}, because its unit \"{}\" is frozen; it has parameters and "
                    "masters",
                    tensor.name, name_of(kind), unit.name));
  if (size_bytes % element_bytes(kind) != 0)
    fail(fmt::format("{} B are not a whole number of elements: the {} of \"{}\" takes {} B each",
                     size_bytes, name_of(kind), tensor.name, element_bytes(kind)));
  const std::uint64_t count = size_bytes / element_bytes(kind);
  if (first_element > tensor.element_count || count > tensor.element_count - first_element)
    fail(fmt::format("{} elements from {} on reach beyond the end of \"{}\", which has {}", count,
                     first_element, tensor.name, tensor.element_count));
}

void StateAccess::follow(const TensorPlace& tensor, StateKind kind, std::uint64_t first_element,
                         std::uint64_t count) {
  const auto is_at = [this](const Position& position) { return read_end_ == position; };
  const std::uint32_t i = index_of(tensor.id);
  if (first_element == 0 && i != 0 &&
      is_at({TensorId{i - 1}, kind, layout_.tensors()[i - 1].element_count}))
    order_ = Order::kFromTensorToTensor;
  else if (!is_at({tensor.id, kind, first_element}))
    order_ = Order::kNone;
  else if (order_ == Order::kNone)
    order_ = Order::kInTensor;
  read_end_ = Position{tensor.id, kind, first_element + count};
}

// Each place has room for one block ahead, but for that of a block whose rest the next call wants.
StateAccess::WantedBlocks StateAccess::wanted_blocks(const TensorPlace& tensor, std::uint64_t begin,
                                                     std::uint64_t end) const {
  const std::uint64_t tensor_end = tensor.offset_elements + tensor.element_count;
  WantedBlocks wanted;
  std::uint32_t last_of_tensor = 0;
  bool has_rest = false;
  for (const BlockPlace& block : layout_.blocks_of(tensor.unit)) {
    const std::uint64_t block_end = block.offset_elements + block.element_count;
    const std::uint32_t i = index_of(block.id);
    if (block.offset_elements < tensor_end && tensor.offset_elements < block_end)
      last_of_tensor = i;
    if (block.offset_elements >= end || begin >= block_end) continue;
    if (wanted.end == 0) wanted.begin = i;
    wanted.end = i + 1;
    has_rest = end < block_end;
  }
  wanted.ahead_end = wanted.end;
  if (order_ == Order::kNone || wanted.end == 0) return wanted;
  const auto limit = order_ == Order::kFromTensorToTensor
                         ? static_cast<std::uint32_t>(layout_.blocks().size())
                         : last_of_tensor + 1;
  wanted.ahead_end =
      std::max(wanted.end, std::min(limit, wanted.end + place_count() - (has_rest ? 1 : 0)));
  return wanted;
}

void StateAccess::read(TensorId id, StateKind kind, std::uint64_t first_element,
                       std::span<std::byte> target) {
  const TensorPlace& tensor = layout_.tensor(id);
  const std::uint64_t count = target.size() / element_bytes(kind);
  const std::uint64_t begin = tensor.offset_elements + first_element;
  const std::uint64_t end = begin + count;
  follow(tensor, kind, first_element, count);
  const WantedBlocks wanted = wanted_blocks(tensor, begin, end);
  const auto copy = [&, this](const BlockPlace& block) {
    const BlockView view = load(block);
    const std::uint64_t from = std::max(begin, block.offset_elements);
    const std::uint64_t to = std::min(end, block.offset_elements + block.element_count);
    read_values(
        layout_, view, kind, from - block.offset_elements,
        target.subspan((from - begin) * element_bytes(kind), (to - from) * element_bytes(kind)));
  };
  if (!reading_ && wanted.ahead_end - wanted.begin <= 1) {
    if (wanted.begin != wanted.end) copy(layout_.blocks()[wanted.begin]);
    return;
  }
  try {
    if (!reading_) reading_.emplace(place_count());
    read_with_threads(wanted, copy);
  } catch (...) {
    reading_.reset();
    throw;
  }
}

void StateAccess::read_with_threads(const WantedBlocks& wanted,
                                    const std::function<void(const BlockPlace& block)>& copy) {
  const std::span<const BlockPlace> blocks = layout_.blocks();
  for (std::uint32_t i = wanted.begin; i < wanted.ahead_end; ++i) {
    const BlockPlace& block = blocks[i];
    reading_->await(place_of(block));
    if (i >= wanted.end && is_loaded(block)) continue;
    if (wanted.end - wanted.begin == 1 && i < wanted.end && is_loaded(block)) {
      copy(block);
    } else if (i < wanted.end) {
      reading_->start(place_of(block), [&copy, &block] { copy(block); });
    } else {
      reading_->start(place_of(block), [this, &block] {
        try {
          (void)load(block);
        } catch (const Error&) {
          // No call has asked for this block yet. The call that does will fail.
        }
      });
    }
  }
  // The places of the other wanted blocks were free before blocks ahead took them.
  for (std::uint32_t i = wanted.begin; i < wanted.end; ++i)
    if (i + place_count() >= wanted.ahead_end) reading_->await(place_of(blocks[i]));
}

}  // namespace sluice
