// The part of StateAccess that gives ranges of the state to the application.
#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>

#include <fmt/format.h>

#include <sluice/error.h>
#include "engine/store/state_access.h"

namespace sluice {

// The blocks that a call waits for, from several threads.
struct StateAccess::AwaitedBlocks {
  void take(const std::function<void()>& work) {
    std::exception_ptr thrown;
    try {
      work();
    } catch (...) {
      thrown = std::current_exception();
    }
    const std::scoped_lock lock(mutex);
    if (thrown && !failure) failure = thrown;
    // Under the lock: the waiter frees this object as soon as nothing is left.
    if (--left == 0) changed.notify_one();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return left == 0; });
    if (failure) std::rethrow_exception(failure);
  }

  // Guarded by mutex.
  std::uint32_t left = 0;
  std::exception_ptr failure = nullptr;
  std::mutex mutex{};
  std::condition_variable changed{};
};

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
  if (!reading_) {
    reading_.emplace(place_count());
    requested_.assign(place_count(), std::nullopt);
  }
  read_with_threads(wanted, copy);
}

void StateAccess::read_with_threads(const WantedBlocks& wanted, const Copy& copy) {
  const std::span<const BlockPlace> blocks = layout_.blocks();
  AwaitedBlocks awaited{.left = wanted.end - wanted.begin};
  try {
    for (std::uint32_t i = wanted.begin; i < wanted.end; ++i) start_copy(wanted, i, copy, awaited);
    for (std::uint32_t i = wanted.end; i < wanted.ahead_end; ++i) {
      const BlockPlace& block = blocks[i];
      std::optional<BlockId>& requested = requested_[place_of(block)];
      if (requested == block.id) continue;  // maybe not there yet: no reason to wait
      reading_->await(place_of(block));
      requested = block.id;
      if (!is_loaded(block))
        reading_->start(place_of(block), [this, &block] { load_ahead(block); });
    }
  } catch (...) {
    stop_reading();  // the tasks use `awaited`
    throw;
  }
  awaited.wait();
}

// The thread of a place goes on with the block that comes next there. So the drive has no pause
// while the application works on what it has asked for.
void StateAccess::start_copy(const WantedBlocks& wanted, std::uint32_t i, const Copy& copy,
                             AwaitedBlocks& awaited) {
  const std::span<const BlockPlace> blocks = layout_.blocks();
  const BlockPlace& block = blocks[i];
  const std::uint32_t after = i + place_count();
  const BlockPlace* const next =
      after >= wanted.end && after < wanted.ahead_end ? &blocks[after] : nullptr;
  reading_->await(place_of(block));
  requested_[place_of(block)] = next != nullptr ? next->id : block.id;
  if (wanted.end - wanted.begin == 1 && is_loaded(block)) {
    awaited.take([&] { copy(block); });
    if (next != nullptr) reading_->start(place_of(block), [this, next] { load_ahead(*next); });
    return;
  }
  reading_->start(place_of(block), [this, &copy, &awaited, &block, next] {
    awaited.take([&] { copy(block); });
    if (next != nullptr) load_ahead(*next);
  });
}

// A failure is that of the call that asks for the block, which loads it again.
void StateAccess::load_ahead(const BlockPlace& block) {
  try {
    (void)load(block);
  } catch (...) {
    // No call has asked for this block yet.
  }
}

void StateAccess::stop_reading() {
  reading_.reset();
  requested_.clear();
}

}  // namespace sluice
