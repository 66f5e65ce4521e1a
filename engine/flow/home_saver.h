// For commits, the saver copies state to storage if the state's home is memory. A block is saved as
// soon as it has the version of the next commit. A block in host memory is written from its place,
// and a block on the device is written through a commit buffer. The next update of the block must
// wait until the save has ended.
//
// Thread rule: scheduler's thread only.
// Progress: a save waits until the block has a free copy on storage. A copy is free if no commit
// names the copy. A save also waits for a commit buffer and for its own transfers. A save never
// waits for a lane, a slot or a gradient.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include <sluice/device.h>
#include "engine/flow/flow_parts.h"
#include "engine/run/scheduler.h"
#include "engine/store/block_store.h"

namespace sluice {

class HomeSaver {
 public:
  struct Hooks {
    // Whether blocks may be written to storage after update number `step` has changed them. The
    // result is true when the tables of all earlier commits have been made.
    std::function<bool(std::uint64_t step)> may_store;
    // The saver calls this function after it has saved a block that add() has queued for `step`.
    std::function<void(std::uint64_t step)> saved;
    std::function<void()> on_change;
  };

  // All arguments must outlive the saver.
  HomeSaver(const FlowParts& parts, Hooks hooks);

  // The number of blocks that are not frozen, and that have at least one plane whose home is
  // memory.
  std::uint32_t block_count() const { return block_count_; }
  bool is_at_home(BlockId block) const { return is_at_home_[index_of(block)]; }
  // Puts the block into the queue of blocks that are saved for the commit of `step`. Requires:
  // is_at_home(), the block is not being saved, and nothing else is using the block.
  void add(BlockId block, std::uint64_t step);
  // Calls add() for every block that is outdated and is not being saved.
  void add_outdated(std::uint64_t step);
  // Returns whether the block's version on storage is older than the version in memory. Requires:
  // is_at_home().
  bool is_outdated(BlockId block) const;
  // Returns true if add() has queued the block, and the block is not on storage yet.
  bool is_saving(BlockId block) const { return is_saving_[index_of(block)]; }
  // Returns true if no block is queued, and no block is being saved.
  bool is_idle() const { return waiting_ == 0 && under_way_ == 0; }
  // Returns true if no block is being saved.
  bool is_at_rest() const { return under_way_ == 0; }

  void pump();
  // Drops the queued blocks. After this call, no save starts.
  void stop();

 private:
  struct Wanted {
    BlockId block{};
    std::uint64_t step = 0;
  };
  struct Save {
    BlockId block{};
    std::uint64_t step = 0;
    Transfer parameters;
    Transfer record;
    std::uint32_t pending = 0;  // transfers and copies
    bool is_busy = false;
  };

  Tier tier(BlockId block, Plane plane) const;
  bool comes_from_device(BlockId block) const;
  bool may_start(const Wanted& wanted) const;
  std::optional<Wanted> take_next(bool has_buffer);
  void start(std::uint32_t save, const Wanted& wanted);
  void write(std::uint32_t save, Plane plane, std::byte* source);
  std::byte* buffer_of(std::uint32_t save, Plane plane) const;
  void ended(std::uint32_t save);

  const Layout& layout_;
  const Placement& placement_;
  const Tiers& tiers_;
  BlockStore& store_;
  Device& device_;
  Scheduler& scheduler_;
  Hooks hooks_;

  std::uint32_t block_count_ = 0;
  std::vector<bool> is_at_home_;  // by block
  std::vector<bool> is_saving_;   // by block
  // There are two queues for the commit of each step. The first queue has the blocks in host
  // memory, and the second queue has the blocks that need a commit buffer.
  std::map<std::uint64_t, std::array<std::deque<BlockId>, 2>> queues_;
  std::uint32_t waiting_ = 0;  // blocks in the queues
  std::vector<Save> saves_;    // the first few have a commit buffer each
  std::uint32_t under_way_ = 0;

  Stream stream_;  // last member, because its callbacks use all others
};

}  // namespace sluice
