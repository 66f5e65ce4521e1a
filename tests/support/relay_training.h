// This training job tests only boundary activations (tests/support/activation_relay.h). Because all
// gradients are zeros, the updates only decay the parameters. Each use checks the parameters, too.
// At any time, the job holds as many leases as the model allows. Thread rule: one thread at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include <sluice/engine.h>
#include <sluice/host_device.h>
#include "engine/store/storage_queue.h"
#include "tests/support/activation_relay.h"

namespace sluice::test {

// Returns a model with `units` small units in a row. If `is_tied` is true, the last use is a second
// use of the first unit.
ModelSpec relay_model(std::uint32_t units, std::vector<std::uint64_t> boundary_bytes,
                      std::uint32_t leases = 1, bool is_tied = false);

struct RelayDelays {
  std::uint64_t seed = 1;
  std::uint32_t us_max = 0;  // the longest delay before each piece of the device's work
  std::uint64_t copy_bytes_per_second = 0;
};

class Relay {
 public:
  // There are `streams` streams, and consecutive uses run on consecutive streams.
  Relay(const Config& config, const ModelSpec& model, std::uint32_t streams = 1,
        const QueueDecorator& decorate = {}, const RelayDelays& delays = {});

  StepReport step(std::uint32_t micro_batches, MicroBatchOrder order);
  void evaluate();
  // The function abandons a step after some uses. `uses` is the number of these uses.
  void abandon_after(std::uint32_t uses, std::uint32_t micro_batches, MicroBatchOrder order);

  Engine& engine() { return *engine_; }
  HostDevice& device() { return *device_; }
  // wrong() returns the number of wrong activations and units. seen() returns the number of checked
  // activations and units.
  std::uint64_t wrong() const { return wrong_.load() + activations_->wrong(); }
  std::uint64_t seen() const { return seen_.load() + activations_->seen(); }

 private:
  std::vector<ActivationRelay::Use> uses_of(std::uint32_t micro_batches,
                                            MicroBatchOrder order) const;
  void walk(Step& step, const std::vector<ActivationRelay::Use>& uses);
  const Stream& next_stream() { return streams_[turn_++ % streams_.size()]; }
  template <class Acquire>
  void hold(std::deque<Lease>& held, const Acquire& acquire);
  void let_go(std::deque<Lease>& held, std::size_t kept);
  void look_at(const Lease& lease);
  void decay();

  ModelSpec model_;
  OptimizerOptions optimizer_;
  std::unique_ptr<HostDevice> device_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<ActivationRelay> activations_;
  std::uint32_t turn_ = 0;
  std::uint64_t updates_ = 0;
  std::vector<std::vector<float>> masters_;  // by unit
  std::atomic<std::uint64_t> wrong_ = 0;
  std::atomic<std::uint64_t> seen_ = 0;
  std::vector<Stream> streams_;  // last, because their work uses all other members
};

}  // namespace sluice::test
