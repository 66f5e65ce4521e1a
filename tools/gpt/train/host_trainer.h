// This class trains the GPT on the host. The class uses only the engine's public API. Each use of a
// unit has one lease. The computation of a use is submitted to a stream of the device. If the
// engine keeps activations, a use also holds leases on the values that cross the unit's boundaries.
//
// Thread rule: one thread at a time. The engine, its device and the dataset must outlive the
// trainer.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <sluice/engine.h>
#include <sluice/host_device.h>
#include "tools/gpt/model/gpt_compute.h"
#include "tools/gpt/train/boundary_leases.h"
#include "tools/gpt/train/trainer.h"

namespace sluice {

// The functions return the shape and the options that a computation on the host has under `config`.
// compute_options() fails with kUnsupported if this machine lacks the library or kernels that
// run.matmul names.
gpt::BatchShape batch_shape(const TrainConfig& config);
gpt::GptComputeOptions compute_options(const TrainConfig& config);

class HostTrainer final : public Trainer {
 public:
  HostTrainer(const TrainConfig& config, const Dataset& dataset, Engine& engine,
              HostDevice& device);

  TrainedStep train_step(std::uint64_t step) override;
  std::optional<double> evaluate_until(const StopRequest& stop,
                                       std::span<const TokenBatch> batches) override;
  bool can_sample() const override { return true; }
  std::span<const float> next_logits(std::span<const std::uint32_t> tokens) override;
  std::uint64_t activation_bytes() const override { return compute_.activation_bytes(); }
  gpt::MatrixWork matrix_work() const override { return compute_.matrix_work(); }

 private:
  using ParameterList = std::vector<const std::byte*>;
  using GradientList = std::vector<std::byte*>;
  // One use of a unit by one micro-batch.
  struct Use {
    std::uint32_t index = 0;  // the use's place in the pass
    std::uint32_t micro_batch = 0;
    std::uint64_t step = 0;
  };
  struct HeldBoundaries {
    BoundaryLeases leases;
    gpt::Boundaries boundaries;
  };

  ParameterList parameters_of(const Lease& lease) const;
  GradientList gradients_of(const Lease& lease) const;
  // The index of a micro-batch among the micro-batches that are under way at the same time.
  std::uint32_t slot_of(std::uint32_t micro_batch) const { return micro_batch % at_once_; }
  void forward(Step& step, const Use& use, double& loss);
  void backward(Step& step, const Use& use);
  // Computes one use of a unit for the batches in `group`.
  void evaluate_use(const StopRequest& stop, std::uint32_t use, const ParameterList& parameters,
                    std::span<const TokenBatch> group, std::vector<double>& losses);
  // `forward_use` is the use's place in forward order.
  template <class Walk>
  HeldBoundaries boundaries_of(Walk& walk, std::uint32_t forward_use, std::uint32_t micro_batch,
                               Pass pass);

  const TrainConfig& config_;
  const Dataset& dataset_;
  Engine& engine_;
  HostDevice& device_;
  ModelSpec model_;
  const std::uint32_t at_once_;  // micro-batches under way at the same time
  gpt::GptCompute compute_;
  Stream stream_;  // declared last, because its work uses all members above
};

}  // namespace sluice
