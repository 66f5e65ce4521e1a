// Access to the state from outside of steps, tensor by tensor, wherever its blocks live: filling in
// initial values, and reading for saving and hashing. Works block by block through one optimizer
// lane, so it needs no memory of its own.
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
#include "engine/store/tiers.h"

namespace sluice {

class StateAccess {
 public:
  // All must outlive it.
  StateAccess(const Layout& layout, const Placement& placement, const Tiers& tiers,
              BlockStore& store, Device& device, Scheduler& scheduler);

  // Writes masters and moments from `source` to every block's home, at the source's step.
  // Fails with: kNonFinite naming tensor and element of a value that is not finite in the
  // parameters' type; kIo and others. It can be called again then.
  void restore(StateSource& source);
  // Durable: reads state at home in memory from storage, where the last commit left it.
  // Fails with: kIo and others.
  void open();
  // From now on the homes that restore() or open() has filled count as in use. Call it once, after
  // all ranks have filled theirs.
  void lend_homes();

  // Fails with: kInvalidArgument for a call of read() that is not allowed, with tensor and numbers.
  void check_read(TensorId tensor, StateKind kind, std::uint64_t first_element,
                  std::uint64_t size_bytes) const;
  // Copies elements [first_element, ...) of `kind` to `target`.
  // Requires: check_read().
  void read(TensorId tensor, StateKind kind, std::uint64_t first_element,
            std::span<std::byte> target);

  // The state has changed: forgets the block held in the lane.
  void invalidate() { loaded_.reset(); }

 private:
  // A block's planes, at home or in the lane.
  struct View {
    BlockId block{};
    std::byte* parameters = nullptr;
    std::byte* record = nullptr;
  };

  std::uint64_t element_bytes(StateKind kind) const;
  View view_of(const BlockPlace& block) const;
  const View& load(const BlockPlace& block);
  void store(const View& view);
  void bring_to_device(const View& view);
  void count_homes(const BlockPlace& block);
  void copy_now(std::byte* target, const std::byte* source, std::uint64_t size_bytes);
  void fill(const View& view, const BlockPlace& block, StateSource& source);
  void set_moments(const View& view, const TensorPlace& tensor, std::uint64_t first,
                   std::uint64_t count, StateSource& source) const;
  void check_values(const TensorPlace& tensor, std::uint64_t first_element,
                    std::span<const float> values) const;
  void set_masters(const View& view, std::uint64_t first, std::span<const float> values) const;
  void read_as_masters(const View& view, std::uint64_t begin, std::span<std::byte> target) const;
  void read_block(const View& view, StateKind kind, std::uint64_t begin,
                  std::span<std::byte> target) const;

  const Layout& layout_;
  const Placement& placement_;
  const Tiers& tiers_;
  BlockStore& store_;
  Device& device_;
  Scheduler& scheduler_;
  Stream stream_;
  std::optional<View> loaded_;  // the content of the lane
  PoolMarks filled_;            // homes that have their values
};

}  // namespace sluice
