// The sequence of a step: acquire and release unit by unit as the schedule says, then drain, norm,
// clip factor and pass. Composes prefetcher, gradient drain and optimizer pass; leases and steps
// (engine/step.h) are its handles.
//
// Thread rule: one application thread at a time calls it; the parts run on the scheduler's thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "engine/gradient_drain.h"
#include "engine/optimizer_pass.h"
#include "engine/prefetcher.h"
#include "engine/traffic.h"

namespace sluice {

struct StepOptions {
  double learning_rate = 0;
  std::uint32_t micro_batches = 1;
};

struct StepReport {
  std::uint64_t step = 0;         // applied updates after this step
  double gradient_norm = 0;       // of the mean gradient over the micro-batches, before clipping
  double clip_factor = 1;         // what the gradient was multiplied with to respect clip_norm
  bool skipped = false;           // non-finite gradient under policy "skip": nothing was updated
  std::int64_t stall_ns = 0;      // computation waited for parameters or gradient slots
  std::int64_t optimizer_ns = 0;  // from the norm to the last write
  std::uint64_t nvme_read_bytes = 0;
  std::uint64_t nvme_write_bytes = 0;
  std::vector<std::string> notes;  // for the user: slow transfers, reads that were repeated
};

// What a lease refers to.
struct LeasedUse {
  std::uint32_t use = 0;
  UnitId unit{};
  const std::byte* parameters = nullptr;  // device memory
  std::byte* gradients = nullptr;         // device memory; null but in backward
};

class StepLoop {
 public:
  // All must outlive the loop. `model` is validated().
  StepLoop(const Config& config, const ModelSpec& model, const Layout& layout,
           const Placement& placement, const Tiers& tiers, BlockStore& store, IoQueue& queue,
           Device& device, Scheduler& scheduler, Worker& worker);

  void begin_step(const StepOptions& options);
  void begin_inference();

  LeasedUse acquire(UnitId unit, Pass pass, StreamId stream);
  void release(const LeasedUse& lease) noexcept;

  StepReport finish_step();
  // Ends a step or an inference without an update; the state is as before. Returns when nothing is
  // in flight any more, unless the store is stuck.
  void abandon() noexcept;
  // Returns when nothing is in flight, stuck or not: memory may be freed after it.
  void settle() noexcept;

  bool is_active() const { return plan_ != nullptr; }
  std::uint64_t applied_step() const { return applied_step_; }
  Traffic predict_traffic(std::uint32_t micro_batches);
  // Throws what keeps the engine from going on, if anything does.
  void throw_if_unusable() const;

 private:
  struct Plan {
    Schedule schedule;
    WindowPlan window;
  };
  struct UseState {
    StreamId stream{};
    std::optional<std::uint32_t> gradient_slot;
    bool is_released = false;
  };

  const Plan& plan_for(std::uint32_t micro_batches);
  void begin(const Plan& plan);
  void check_acquire(UnitId unit, Pass pass) const;
  std::string describe_use(std::size_t use) const;
  void throw_if_device_failed() const;
  double mean_gradient_norm() const;
  bool is_idle() const;
  [[noreturn]] void fail_non_finite() const;
  void run_pass(double clip_factor);
  std::int64_t stall_ns() const;

  const Config& config_;
  const ModelSpec& model_;
  const Layout& layout_;
  const Placement& placement_;
  const Tiers& tiers_;
  BlockStore& store_;
  IoQueue& queue_;
  Device& device_;
  Scheduler& scheduler_;
  std::vector<std::uint64_t> window_unit_bytes_;
  Prefetcher prefetcher_;
  GradientDrain drain_;
  OptimizerPass pass_;
  std::map<std::uint32_t, Plan> plans_;  // by micro-batches; 0 = inference

  // The step under way.
  const Plan* plan_ = nullptr;
  StepOptions options_;
  std::uint32_t next_use_ = 0;
  std::uint32_t leases_held_ = 0;
  std::vector<UseState> uses_;
  std::vector<Event> arrived_events_;  // by use: computation is ready for the unit
  std::vector<Event> resumed_events_;  // by use: and goes on with it
  IoCounters counters_at_begin_;

  std::uint64_t applied_step_ = 0;
  std::optional<Error> poison_;
};

}  // namespace sluice
