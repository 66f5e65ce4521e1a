// Access to the state between steps, tensor by tensor, wherever the blocks live. The class sets
// initial values, and reads the state for saving and hashing. The class works on several blocks at
// once, in the memory of the optimizer's lanes. So the class needs no memory of its own.
//
// Thread rule: the application's thread, while no step is active.
// Invariant: between two calls only reads of blocks that the next calls of read() will want are in
// flight. After invalidate() nothing is.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include <sluice/device.h>
#include <sluice/state.h>
#include <sluice/state_source.h>
#include "engine/store/block_places.h"
#include "engine/store/block_store.h"
#include "engine/store/block_values.h"
#include "engine/store/tiers.h"
#include "engine/store/unit_versions.h"

namespace sluice {

class StateAccess {
 public:
  // All arguments must outlive the object.
  StateAccess(const Layout& layout, const Placement& placement, const Tiers& tiers,
              BlockStore& store, Device& device, Scheduler& scheduler);

  // Writes masters and moments from `source` to every block's home, as `versions`.
  // Fails with kNonFinite if a value is not finite in the parameters' type, naming tensor and
  // element. Other failures, such as kIo, come from the transfers. After a failure, restore() can
  // be called again.
  void restore(StateSource& source, const UnitVersions& versions);
  // Gives new masters, from `values`, to the tensors that `is_wanted` lists by id. The state stays
  // at `versions`. The call needs memory for one more block.
  // Fails with the errors of restore(). Each block then has its old or its new values.
  void replace(const std::vector<bool>& is_wanted, const InitialValues& values,
               const UnitVersions& versions);
  // With a durable store, reads the state that is at home in memory. The call reads this state from
  // storage, where the last commit left it.
  // Other failures, such as kIo, come from the transfers.
  void open();
  // From now on, the homes that restore() or open() has filled count as in use. The call is made
  // once, after all ranks have filled their homes.
  void lend_homes();

  // Fails with kInvalidArgument, naming tensor and numbers, if such a call of read() is not
  // allowed.
  void check_read(TensorId tensor, StateKind kind, std::uint64_t first_element,
                  std::uint64_t size_bytes) const;
  // The call copies elements [first_element, ...) of `kind` to `target`.
  // If calls follow one another through a tensor, or from tensor to tensor, the blocks that come
  // next are read while the application works on these.
  // Requires: check_read().
  void read(TensorId tensor, StateKind kind, std::uint64_t first_element,
            std::span<std::byte> target);

  using Visit = std::function<void(const BlockView& view, std::uint32_t place)>;
  // Calls `visit` with every block of this rank in host memory. The block is at its home or in a
  // place. Several threads call `visit` at the same time, each for a different block. No two
  // threads call `visit` for the same place at the same time.
  // Fails with the errors of read(), and with the exceptions of `visit`.
  void visit_blocks(const Visit& visit);
  // The number of blocks that visit_blocks() has in memory at once.
  std::uint32_t place_count() const { return static_cast<std::uint32_t>(loaded_.size()); }

  // Forgets the blocks in the lanes, because the state will change or has changed. On return,
  // nothing uses the lanes.
  void invalidate();

 private:
  // Where the last read() ended. The next read may continue there.
  struct Position {
    TensorId tensor{};
    StateKind kind = StateKind::kParameter;
    std::uint64_t element = 0;

    bool operator==(const Position&) const = default;
  };
  struct AwaitedBlocks;
  // How the last calls of read() followed one another.
  enum class Order : std::uint8_t { kNone, kInTensor, kFromTensorToTensor };

  // The blocks of a read(), as a range of ids, and those that the next calls will want: from `end`
  // to `ahead_end`.
  struct WantedBlocks {
    std::uint32_t begin = 0;
    std::uint32_t end = 0;
    std::uint32_t ahead_end = 0;
  };
  void follow(const TensorPlace& tensor, StateKind kind, std::uint64_t first_element,
              std::uint64_t count);
  WantedBlocks wanted_blocks(const TensorPlace& tensor, std::uint64_t begin,
                             std::uint64_t end) const;
  // Calls `copy` for each wanted block, and begins to load those that come next.
  using Copy = std::function<void(const BlockPlace& block)>;
  void read_with_threads(const WantedBlocks& wanted, const Copy& copy);
  void start_copy(const WantedBlocks& wanted, std::uint32_t i, const Copy& copy,
                  AwaitedBlocks& awaited);
  void load_ahead(const BlockPlace& block);
  void stop_reading();
  std::uint64_t element_bytes(StateKind kind) const;
  BlockView view_of(const BlockPlace& block, std::uint32_t place) const;
  std::uint32_t place_of(const BlockPlace& block) const {
    return index_of(block.id) % place_count();
  }
  bool is_loaded(const BlockPlace& block) const { return loaded_[place_of(block)] == block.id; }
  // These functions work directly on the memory of a block, and may run for several blocks at the
  // same time.
  BlockView load(const BlockPlace& block);
  void open(const BlockPlace& block);
  void store(const BlockView& view);
  void bring_to_device(const BlockView& view);
  void clear(const BlockPlace& block);
  bool is_overwritten(const BlockPlace& before, const BlockPlace& next) const;
  void count_homes(const BlockPlace& block);
  void copy_now(std::byte* target, const std::byte* source, std::uint64_t size_bytes);

  const Layout& layout_;
  const Placement& placement_;
  const Tiers& tiers_;
  BlockStore& store_;
  Device& device_;
  Scheduler& scheduler_;
  Stream stream_;
  std::mutex device_mutex_;                     // for the stream
  std::vector<std::optional<BlockId>> loaded_;  // by place: the block in it
  std::optional<Position> read_end_;
  Order order_ = Order::kNone;
  PoolMarks filled_;  // homes that have their values
  // By place: the block that the place's thread has loaded, or will load, while there are threads.
  std::vector<std::optional<BlockId>> requested_;
  std::optional<BlockPlaces> reading_;  // last: its threads use everything above
};

}  // namespace sluice
