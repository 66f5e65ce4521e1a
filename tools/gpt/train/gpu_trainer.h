// This class trains the GPT on a GPU through the engine's public API. Each use of a unit has one
// lease. The kernels of all uses are enqueued on one stream of the device, while the engine moves
// other units.
//
// Thread rule: one thread at a time. The engine, its device, the model and the dataset must outlive
// the trainer.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include <sluice/engine.h>
#include "tools/gpt/model/device_gpt.h"
#include "tools/gpt/train/trainer.h"

namespace sluice {

class GpuTrainer final : public Trainer {
 public:
  // `gpt` lies on `device` and has the shape that `config` gives.
  GpuTrainer(const TrainConfig& config, const Dataset& dataset, Engine& engine, Device& device,
             gpt::DeviceGpt& gpt);

  TrainedStep train_step(std::uint64_t step) override;
  std::optional<double> evaluate_until(const StopRequest& stop,
                                       std::span<const TokenBatch> batches) override;
  std::uint64_t activation_bytes() const override { return gpt_.activation_bytes(); }

 private:
  const TrainConfig& config_;
  const Dataset& dataset_;
  Engine& engine_;
  Device& device_;
  gpt::DeviceGpt& gpt_;
  ModelSpec model_;
  Stream stream_;  // last, because its work uses all of the above
};

}  // namespace sluice
