// This class trains the GPT on a GPU through the engine's public API. Each use of a unit has one
// lease. The kernels of all uses are enqueued on one stream of the device. While kernels run for
// one unit, the engine moves other units.
//
// Thread rule: one thread at a time. The engine, its device, the model and the dataset must outlive
// the trainer.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include <sluice/engine.h>
#include "tools/gpt/model/device_gpt.h"
#include "tools/gpt/train/boundary_leases.h"
#include "tools/gpt/train/trainer.h"

namespace sluice {

// Returns the options of a DeviceGpt for a run with `config`.
gpt::DeviceGptOptions gpu_options(const TrainConfig& config);

class GpuTrainer final : public Trainer {
 public:
  // `gpt` must have been made for `device`, with the shape of `config` and with the result of
  // gpu_options().
  GpuTrainer(const TrainConfig& config, const Dataset& dataset, Engine& engine, Device& device,
             gpt::DeviceGpt& gpt);

  TrainedStep train_step(std::uint64_t step) override;
  std::optional<double> evaluate_until(const StopRequest& stop,
                                       std::span<const TokenBatch> batches) override;
  std::uint64_t activation_bytes() const override { return gpt_.activation_bytes(); }

 private:
  // One use of a unit by one micro-batch.
  struct Use {
    std::uint32_t index = 0;  // the use's place in the pass
    std::uint32_t micro_batch = 0;
    std::uint64_t step = 0;
  };
  struct HeldBoundaries {
    BoundaryLeases leases;
    gpt::DeviceBoundaries boundaries;
  };

  void forward(Step& step, const Use& use);
  void backward(Step& step, const Use& use);
  // `forward_use` is the use's place in forward order.
  HeldBoundaries boundaries_of(Step& step, std::uint32_t forward_use, std::uint32_t micro_batch,
                               Pass pass);

  const TrainConfig& config_;
  const Dataset& dataset_;
  Engine& engine_;
  Device& device_;
  gpt::DeviceGpt& gpt_;
  const std::uint32_t at_once_;  // micro-batches under way at the same time
  ModelSpec model_;
  Stream stream_;  // declared last, because its work uses all members above
};

}  // namespace sluice
