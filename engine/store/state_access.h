// Access to the state between steps, tensor by tensor, wherever the blocks live. Fills in initial
// values, and reads the state for saving and hashing. Works block by block in the memory of one
// optimizer lane, and so needs no memory of its own.
//
// Thread rule: the application's thread, while no step is active.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include <sluice/device.h>
#include <sluice/state.h>
#include <sluice/state_source.h>
#include "engine/store/block_store.h"
#include "engine/store/block_values.h"
#include "engine/store/tiers.h"

namespace sluice {

class StateAccess {
 public:
  // All arguments must outlive the object.
  StateAccess(const Layout& layout, const Placement& placement, const Tiers& tiers,
              BlockStore& store, Device& device, Scheduler& scheduler);

  // Writes masters and moments from `source` to every block's home, at the source's step.
  // Fails with: kNonFinite naming tensor and element of a value that is not finite in the
  // parameters' type; kIo and others. After a failure, restore() can be called again.
  void restore(StateSource& source);
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

  // Forgets the block in the lane, because the state has changed.
  void invalidate() { loaded_.reset(); }

 private:
  std::uint64_t element_bytes(StateKind kind) const;
  BlockView view_of(const BlockPlace& block) const;
  const BlockView& load(const BlockPlace& block);
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
  std::optional<BlockView> loaded_;  // the content of the lane
  PoolMarks filled_;                 // homes that have their values
};

}  // namespace sluice
