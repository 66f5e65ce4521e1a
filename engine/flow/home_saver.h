// Saves state that is at home in memory to storage, for commits. A block is saved as soon as it has
// the version that will be committed. A block in host memory is written from its place, and a block
// on the device through a commit buffer. The block must not be updated again before the save has
// ended.
//
// Thread rule: scheduler's thread only.
// Progress: a save waits for a copy that no commit names, for a commit buffer, and for its own
// transfers. A save never waits for a lane, a slot or a gradient.
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
    // Whether stores of `version` may begin, because every earlier commit has its table.
    std::function<bool(std::uint64_t version)> may_store;
    // A block is on storage as `version`.
    std::function<void(std::uint64_t version)> saved;
    std::function<void()> on_change;
  };

  // All must outlive the saver.
  HomeSaver(const FlowParts& parts, Hooks hooks);

  // How many blocks of the model have updated state at home in memory.
  std::uint32_t block_count() const { return block_count_; }
  bool is_at_home(BlockId block) const { return is_at_home_[index_of(block)]; }
  // Saves the block. Requires: is_at_home(), at rest, not being saved.
  void add(BlockId block);
  // Adds every block that storage has in an older version.
  void add_outdated();
  // Whether the block has been added and is not on storage yet.
  bool is_saving(BlockId block) const { return is_saving_[index_of(block)]; }
  // Whether nothing has to be saved.
  bool is_idle() const { return waiting_ == 0 && under_way_ == 0; }
  // Whether nothing is under way.
  bool is_at_rest() const { return under_way_ == 0; }

  void pump();
  // Starts nothing more, permanently.
  void stop();

 private:
  struct Save {
    BlockId block{};
    Transfer parameters;
    Transfer record;
    std::uint32_t pending = 0;  // transfers and copies
    bool is_busy = false;
  };

  Tier tier(BlockId block, Plane plane) const;
  bool comes_from_device(BlockId block) const;
  bool may_start(BlockId block) const;
  std::optional<BlockId> take_next(bool has_buffer);
  void start(std::uint32_t save, BlockId block);
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
  // By the blocks' version: those in host memory, and those that need a commit buffer.
  std::map<std::uint64_t, std::array<std::deque<BlockId>, 2>> queues_;
  std::uint32_t waiting_ = 0;  // blocks in the queues
  std::vector<Save> saves_;    // the first ones have a commit buffer
  std::uint32_t under_way_ = 0;

  Stream stream_;  // last: its callbacks use everything above
};

}  // namespace sluice
