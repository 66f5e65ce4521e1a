// During training, the saver passes the state of one step to a checkpoint, block by block. A block
// is loaded into a buffer, and the buffer's thread writes the block to the checkpoint. Some state
// has its home in host memory. This state is written directly from host memory, and is not loaded.
// The next update of a block waits until the block has been loaded. If a part of the block has its
// home in host memory, the next update waits until the block has been written. So the checkpoint
// contains exactly the state of its step, and needs no memory except the buffers.
//
// Thread rule: scheduler's thread only. The functions in `Work` are an exception, because they run
// on the buffers' threads.
// Progress: a block waits until the result of its last update is at home. The block also waits for
// a buffer and for its own transfers. The saver never waits for a later update, a parameter slot, a
// lane, a gradient, a commit or another rank.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include <sluice/device.h>
#include <sluice/error.h>
#include "engine/flow/flow_parts.h"
#include "engine/run/scheduler.h"
#include "engine/store/block_places.h"
#include "engine/store/block_store.h"
#include "engine/store/block_values.h"
#include "engine/store/unit_versions.h"

namespace sluice {

class StateSaver {
 public:
  struct Hooks {
    // Whether the block is at rest: no update of the block is running, and no new state of the
    // block is being written to its home.
    std::function<bool(BlockId block)> is_at_rest;
    std::function<void()> on_change;
  };
  struct Work {
    // Writes the block to the checkpoint. Several threads call this function, each with its own
    // `place` and `room`.
    std::function<void(const BlockView& view, std::uint32_t place, std::span<std::byte> room)>
        write;
    // The saver calls this function once, after the last block.
    std::function<void()> finish;
  };

  // All arguments must outlive the saver.
  StateSaver(const FlowParts& parts, Hooks hooks);

  // Starts the threads that write the checkpoint.
  // Fails with kUnsupported if no thread can be started.
  void prepare();
  // Begins to save the state that update number `step` has produced. Blocks are saved in the order
  // of `blocks`. Requires: prepare() has been called, no save is under way, and no update with a
  // number above `step` has begun.
  void begin(std::uint64_t step, std::vector<BlockId> blocks, Work work);
  // Returns whether the save still needs the state that the block has after the update with the
  // number `step`. If so, the block's next update has to wait.
  bool holds(BlockId block, std::uint64_t step) const;
  // Called when an update waits for the block. If no update waits for another block, the saver
  // loads this block next. Requires: holds().
  void want(BlockId block);
  // Whether an update waits for a block of the save.
  bool is_wanted() const { return wanted_.has_value(); }

  bool is_under_way() const { return is_under_way_; }
  // Whether the save that begin() started has ended. The save may have failed.
  bool is_over() const { return is_under_way_ && is_over_; }
  struct End {
    std::optional<Error> failure;
    std::int64_t update_wait_ns = 0;
  };
  // Makes the saver ready for the next save. Requires: is_over().
  End end();
  std::uint64_t saved_count() const { return saved_count_; }
  std::uint64_t block_count() const { return blocks_.size(); }

  void pump();
  // From now on, the saver starts no more work.
  void stop() { is_stopped_ = true; }
  // Whether all transfers, copies and threads of the saver are at rest.
  bool is_at_rest() const { return busy_ == 0; }

 private:
  enum class Phase : std::uint8_t { kFree, kLoading, kWriting };
  struct Place {
    Transfer parameters;
    Transfer record;
    BlockView view;
    std::uint32_t pending = 0;  // transfers and copies
    Phase phase = Phase::kFree;
    bool is_in_place = false;  // part of the block is written directly from its home
  };

  bool may_load(BlockId block) const;
  std::optional<BlockId> next();
  void load(std::uint32_t place, BlockId block);
  std::byte* load_plane(std::uint32_t place, Plane plane, std::byte* buffer);
  void loaded(std::uint32_t place);
  void write(std::uint32_t place);
  void run(std::uint32_t place, std::function<void()> task);
  void ended(std::uint32_t place, const std::optional<Error>& failure);
  void let_go(BlockId block);
  void end_wait();
  bool has_stopped() const { return is_stopped_ || scheduler_.failed() || failure_; }

  const Layout& layout_;
  const Placement& placement_;
  const Tiers& tiers_;
  BlockStore& store_;
  Device& device_;
  Scheduler& scheduler_;
  const UnitVersions& versions_;
  Hooks hooks_;

  // The save under way:
  bool is_under_way_ = false;
  bool is_over_ = false;
  bool is_finishing_ = false;
  std::uint64_t step_ = 0;
  std::vector<std::uint64_t> unit_versions_;  // by unit: the versions at the end of step_
  std::vector<BlockId> blocks_;
  std::size_t next_ = 0;  // index in blocks_; all blocks before it have been taken
  Work work_;
  std::vector<bool> is_taken_;    // by block
  std::vector<bool> may_change_;  // by block: whether an update may begin
  std::uint64_t saved_count_ = 0;
  std::optional<BlockId> wanted_;  // the block for which an update waits
  std::uint64_t wait_begin_ns_ = 0;
  std::int64_t update_wait_ns_ = 0;
  std::optional<Error> failure_;
  bool is_stopped_ = false;

  const std::uint64_t room_bytes_;  // at the end of each buffer
  std::vector<Place> places_;
  std::uint32_t busy_ = 0;  // places
  Stream stream_;
  std::optional<BlockPlaces> threads_;  // last member, because its tasks use all others
};

}  // namespace sluice
