// Access to the state between steps, tensor by tensor, wherever the blocks live. Fills in initial
// values, and reads the state for saving and hashing. Works on several blocks at once in the memory
// of the optimizer's lanes, and so needs no memory of its own.
//
// Thread rule: the application's thread, while no step is active.
// Invariant: between two calls nothing is in flight.
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
  // Fails with: kNonFinite naming tensor and element of a value that is not finite in the
  // parameters' type; kIo and others. After a failure, restore() can be called again.
  void restore(StateSource& source, const UnitVersions& versions);
  // Gives the tensors that `is_wanted` lists by id other masters, from `values`. The state stays at
  // `versions`. Needs memory for one more block.
  // Fails with: as restore(); then each block has its old or its new values.
  void replace(const std::vector<bool>& is_wanted, const InitialValues& values,
               const UnitVersions& versions);
  // With a durable store: reads state that is at home in memory from storage, where the last commit
  // left the state.
  // Fails with: kIo and others.
  void open();
  // From now on, the homes that restore() or open() has filled count as in use. Called once, after
  // all ranks have filled their homes.
  void lend_homes();

  // Fails with: kInvalidArgument for a call of read() that is not allowed, with tensor and numbers.
  void check_read(TensorId tensor, StateKind kind, std::uint64_t first_element,
                  std::uint64_t size_bytes) const;
  // Copies elements [first_element, ...) of `kind` to `target`.
  // Requires: check_read().
  void read(TensorId tensor, StateKind kind, std::uint64_t first_element,
            std::span<std::byte> target);

  // Calls `visit` with every block of this rank in host memory, at its home or in a place. Several
  // threads call `visit` at the same time, each for a different block, and never two threads for
  // the same place.
  // Fails with: as read(); the exceptions of `visit`.
  using Visit = std::function<void(const BlockView& view, std::uint32_t place)>;
  void visit_blocks(const Visit& visit);
  // How many blocks visit_blocks() has in memory at once.
  std::uint32_t place_count() const { return static_cast<std::uint32_t>(loaded_.size()); }

  // Forgets the blocks in the lanes, because the state has changed.
  void invalidate() { loaded_.assign(loaded_.size(), std::nullopt); }

 private:
  // The end of the last read(). The next read may continue there.
  struct Position {
    TensorId tensor{};
    StateKind kind = StateKind::kParameter;
    std::uint64_t element = 0;

    bool operator==(const Position&) const = default;
  };

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
  PoolMarks filled_;  // homes that have their values
};

}  // namespace sluice
