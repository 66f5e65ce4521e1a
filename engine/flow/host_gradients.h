// This class keeps the gradients that wait in host memory for their update. A unit's first gradient
// of the step is copied. Later gradients pass through staging slots piece by piece. The worker adds
// each piece to the sum, with one fp32 addition and one rounding per element. While the worker adds
// the last gradient, it also takes the norm of the sum, so that it reads the sum only once.
//
// Thread rule: scheduler's thread only, except where stated.
// Progress: a piece waits for a staging slot. The staging slot becomes free when the piece has been
// added to the sum.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/flow/flow_parts.h"
#include "engine/flow/gradient_home.h"
#include "engine/run/worker.h"
#include "gpu/device/copy_runs.h"

namespace sluice {

class HostGradients final : public GradientHome {
 public:
  // `parts` must outlive the object.
  HostGradients(const FlowParts& parts, Callbacks callbacks);

  void start(const GradientMove& move, StreamId stream) override;
  void take_norm(const GradientSum& sum, StreamId stream) override;
  const NormAccumulator& norm(UnitId unit) const override { return norms_[index_of(unit)].total; }
  std::optional<std::uint64_t> first_non_finite(const GradientRange& range) const override;

 private:
  struct StagingSlot {
    GradientRange piece;
    bool is_free = true;
  };

  struct UnitNorm {
    NormAccumulator total;   // written by the worker
    bool is_of_sum = false;  // the additions have taken it
  };

  void copied_whole();
  void pump();
  void start_piece(std::uint32_t slot, CopyRuns& runs);
  void copied(std::uint32_t slot);
  void add(std::uint32_t slot);
  void added(std::uint32_t slot);
  void measure(const GradientSum& sum);
  std::uint32_t block_of(const GradientRange& piece) const;

  const Layout& layout_;
  const CountedTensors& counted_;
  const Placement& placement_;
  const Tiers& tiers_;
  Device& device_;
  Scheduler& scheduler_;
  Worker& worker_;

  // The gradient that is being added.
  GradientMove move_;
  StreamId stream_{};
  std::uint64_t next_element_ = 0;  // in the range of move_
  std::uint32_t copies_left_ = 0;
  std::uint32_t additions_left_ = 0;
  bool takes_norm_ = false;
  std::vector<StagingSlot> staging_;
  std::vector<UnitNorm> norms_;  // by unit
};

}  // namespace sluice
