// The class keeps gradients on storage until their update. Each gradient of a unit passes through
// host memory block by block. In host memory, each block is added to the sum of the unit's earlier
// gradients. Each element gets one fp32 addition and one rounding. So the sum has the same bits as
// a sum in the gradient set. The block is also counted in the unit's norm, and is then written to
// storage. One gradient is processed at a time.
//
// Thread rule: scheduler's thread only, except where stated.
// Progress: a block waits for one staging slot. A block that is added to a sum waits for two
// staging slots. The slots of an earlier block become free when this block has reached its home. A
// block also waits for copies, the worker, and storage. While a unit may still get gradients, the
// optimizer pass does not read the unit's gradients (engine/flow/optimizer_pass.h).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "engine/flow/flow_parts.h"
#include "engine/flow/gradient_home.h"
#include "engine/flow/waiting_gradients.h"
#include "engine/run/worker.h"
#include "engine/store/block_store.h"

namespace sluice {

class GradientSpill final : public GradientHome {
 public:
  // All arguments must outlive the object.
  GradientSpill(const FlowParts& parts, WaitingGradients& waiting, Callbacks callbacks);

  void start(const GradientMove& move, StreamId stream) override;
  bool moves_zeros() const override { return true; }
  // Each block is counted in the norm before the block is written to storage. So the norm is
  // already known when take_norm() is called.
  void take_norm(const GradientSum& sum, StreamId) override { callbacks_.on_norm(sum.unit); }
  const NormAccumulator& norm(UnitId unit) const override { return sums_[index_of(unit)].norm; }
  std::optional<std::uint64_t> first_non_finite(const GradientRange& range) const override;

  bool is_idle() const { return blocks_left_ == 0; }

 private:
  static constexpr std::uint32_t kNone = 0xffffffffu;

  // A staging slot, which holds one block of the gradient. If the block is added to a sum, a second
  // slot holds the part of the sum that belongs to this block. The second slot is called the
  // partner.
  struct Slot {
    Transfer transfer;
    BlockId block{};
    std::uint32_t partner = kNone;  // the other slot of the block, if there is one
    std::uint32_t pending = 0;      // number of arrivals for which the addition still waits
    bool is_free = true;
  };
  // The sum of a unit. While a task for the worker is waiting or running, only the worker writes to
  // this object.
  struct Sum {
    NormAccumulator norm;
    std::optional<std::uint64_t> first_non_finite;
  };

  void pump();
  bool start_block();
  std::uint32_t free_slot() const;
  std::uint32_t take_slot(BlockId block);
  void free(std::uint32_t slot);
  void copied(const std::vector<std::uint32_t>& slots);
  void fetch_sum(std::uint32_t slot);
  void arrived(std::uint32_t slot);
  void add(std::uint32_t slot);
  void added(std::uint32_t slot);
  void send_home(std::uint32_t slot);
  void home(std::uint32_t slot);
  std::uint64_t size_bytes(BlockId block) const {
    return layout_.block(block).element_count * layout_.format().gradient_bytes();
  }

  const Layout& layout_;
  const CountedTensors& counted_;
  const Placement& placement_;
  const Tiers& tiers_;
  Device& device_;
  Scheduler& scheduler_;
  Worker& worker_;
  BlockStore& store_;
  WaitingGradients& waiting_;

  GradientMove move_;
  StreamId stream_{};
  std::uint32_t next_block_ = 0;       // of the unit
  std::uint32_t blocks_in_slot_ = 0;   // not copied yet
  std::uint32_t blocks_left_ = 0;      // not home yet
  std::vector<std::uint32_t> coming_;  // slots to which pump() has given blocks of the gradient
  std::vector<Slot> slots_;
  std::vector<Sum> sums_;  // by unit
};

}  // namespace sluice
