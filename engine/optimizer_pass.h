// The update of every block, once the gradients are complete: read what is not in memory, Adam,
// write back, with several blocks in flight so that the three overlap. A lane holds one block
// between the start of its reads and the end of its writes.
//
// Thread rule: scheduler's thread only.
// Progress: a lane waits for its own reads, the worker and its own writes, and for nothing else.
// Blocks of the same pass are independent, so any order of completion gives the same bits.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/block_store.h"
#include "engine/block_update.h"
#include "engine/worker.h"

namespace sluice {

class OptimizerPass {
 public:
  // All must outlive the pass.
  OptimizerPass(const Layout& layout, const Placement& placement, const Tiers& tiers,
                BlockStore& store, Device& device, Scheduler& scheduler, Worker& worker);

  // Starts the update from version `version` to the next one.
  // Requires: the gradient set is complete, and idle().
  void begin(const StepCoefficients& coefficients, std::uint64_t version);

  // Every block has its new version at home.
  bool is_complete() const { return blocks_done_ == layout_.blocks().size(); }
  bool idle() const { return lanes_busy_ == 0; }

 private:
  struct Lane {
    Transfer parameter_transfer;
    Transfer record_transfer;
    BlockId block{};
    std::byte* parameters = nullptr;  // where Adam finds them: in the lane, or at home
    std::byte* record = nullptr;
    std::uint32_t pending = 0;  // transfers and copies before the next phase
    bool is_busy = false;
    bool is_updated = false;
  };

  void pump();
  void start_block(std::uint32_t lane);
  void transferred(std::uint32_t lane);
  void update(std::uint32_t lane);
  void updated(std::uint32_t lane);
  void finish_block(std::uint32_t lane);
  void add_pending_copy(std::uint32_t lane, StreamId stream);
  std::byte* resident_block(const BlockPlace& block) const;

  const Layout& layout_;
  const Placement& placement_;
  const Tiers& tiers_;
  BlockStore& store_;
  Device& device_;
  Scheduler& scheduler_;
  Worker& worker_;

  std::vector<Lane> lanes_;
  std::uint32_t lanes_busy_ = 0;
  std::uint32_t next_block_ = 0;
  std::uint64_t blocks_done_ = 0;
  std::uint64_t version_ = 0;
  StepCoefficients coefficients_;

  Stream down_stream_;  // last: their callbacks use all of the above
  Stream up_stream_;
};

}  // namespace sluice
