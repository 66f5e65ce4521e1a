// This class gives access to the state between steps, tensor by tensor. The blocks may be in any
// tier. The class sets initial values, and reads the state for saving and hashing. The class works
// on several blocks at the same time. For these blocks, the class uses the memory of the
// optimizer's lanes, and so needs no memory of its own.
//
// Thread rule: only the application's thread uses the class, and only while no step is active.
// Invariant: between two calls, only transfers that read ahead are in flight. These transfers load
// blocks for later calls of read(). After invalidate(), nothing is in flight.
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

  // Writes masters and moments from `source` to the home of every block. The blocks then have the
  // versions that `versions` lists.
  // Fails with kNonFinite if a value is not finite in the parameters' type. The message names
  // tensor and element. A transfer may fail with other codes, such as kIo. After a failure,
  // restore() can be called again.
  void restore(StateSource& source, const UnitVersions& versions);
  // Replaces the masters of some tensors by `values`. is_wanted[i] says whether tensor i gets new
  // masters. `versions` lists the present versions, which do not change. The call allocates memory
  // for a copy of one block.
  // Fails with the errors of restore(). After a failure, each block has its old or its new values.
  void replace(const std::vector<bool>& is_wanted, const InitialValues& values,
               const UnitVersions& versions);
  // Fills the homes in memory from the last commit of a durable store. A transfer may fail with
  // codes such as kIo.
  void open();
  // Tells the pool meter which homes in memory are in use. restore() or open() has filled these
  // homes. Must be called once, after all ranks have filled their homes.
  void lend_homes();

  // Checks whether read() allows these arguments.
  // Fails with kInvalidArgument if read() does not allow these arguments. The message names the
  // tensor and the numbers.
  void check_read(TensorId tensor, StateKind kind, std::uint64_t first_element,
                  std::uint64_t size_bytes) const;
  // Fills `target` with the tensor's elements of `kind`, beginning with `first_element`.
  // If successive calls move forward through a tensor, or from tensor to tensor, the call also
  // reads ahead. The next blocks are then read while the application uses the present blocks.
  // Requires: check_read() allows the arguments.
  void read(TensorId tensor, StateKind kind, std::uint64_t first_element,
            std::span<std::byte> target);

  using Visit = std::function<void(const BlockView& view, std::uint32_t place)>;
  // Calls `visit` for every block of this rank. During the call, the block is in host memory,
  // either at its home or in place number `place`. Several threads call `visit` at the same time,
  // each for a different block. No two threads call `visit` for the same place at the same time.
  // Fails with the errors of the transfers, such as kIo, and with the exceptions of `visit`.
  void visit_blocks(const Visit& visit);
  // The number of blocks that visit_blocks() has in memory at once.
  std::uint32_t place_count() const { return static_cast<std::uint32_t>(loaded_.size()); }

  // Must be called whenever the state changes, either just before or just after the change. The
  // object forgets the blocks in the lanes. When the call returns, the object uses no lane.
  void invalidate();

 private:
  // The position at which the last read() ended. The next read may continue at this position.
  struct Position {
    TensorId tensor{};
    StateKind kind = StateKind::kParameter;
    std::uint64_t element = 0;

    bool operator==(const Position&) const = default;
  };
  struct AwaitedBlocks;
  // This value says how the last calls of read() moved through the tensors.
  enum class Order : std::uint8_t { kNone, kInTensor, kFromTensorToTensor };

  // Ids of blocks. A call of read() needs the blocks [begin, end). The next calls will probably
  // need the blocks [end, ahead_end).
  struct WantedBlocks {
    std::uint32_t begin = 0;
    std::uint32_t end = 0;
    std::uint32_t ahead_end = 0;
  };
  void follow(const TensorPlace& tensor, StateKind kind, std::uint64_t first_element,
              std::uint64_t count);
  WantedBlocks wanted_blocks(const TensorPlace& tensor, std::uint64_t begin,
                             std::uint64_t end) const;
  // Calls `copy` for each block of [begin, end), and begins to load the blocks [end, ahead_end).
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
  bool lies_at_home(const BlockPlace& block) const;
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
  // Whether the pools are zero, as they were made.
  bool are_pools_clear_ = true;
  // The list is indexed by place. An entry is the block that the thread of this place has loaded or
  // will load. The list is used only while `reading_` has a value.
  std::vector<std::optional<BlockId>> requested_;
  std::optional<BlockPlaces> reading_;  // last: its threads use everything above
};

}  // namespace sluice
