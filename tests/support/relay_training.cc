#include "tests/support/relay_training.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <sluice/units.h>
#include "base/optimizer_math.h"
#include "cpu_optim/optimizer_options.h"
#include "cpu_optim/update.h"
#include "engine/engine_over_queue.h"
#include "engine/plan/layout.h"
#include "tests/support/delays.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

constexpr std::uint64_t kUnitElements = 1000;
// With the usual weight decay a tenth of every weight goes each step.
constexpr double kLearningRate = 10;

}  // namespace

ModelSpec relay_model(std::uint32_t units, std::vector<std::uint64_t> boundary_bytes,
                      std::uint32_t leases, bool is_tied) {
  ModelSpec model;
  for (std::uint32_t i = 0; i < units; ++i) {
    const std::string name = "u" + std::to_string(i);
    model.units.push_back(
        {.name = name, .tensors = {{.name = name + ".w", .shape = {kUnitElements}}}});
    model.forward_order.push_back(UnitId{i});
  }
  if (is_tied) model.forward_order.push_back(UnitId{0});
  model.concurrent_leases = leases;
  model.boundary_bytes = std::move(boundary_bytes);
  return validated(model);
}

Relay::Relay(const Config& config, const ModelSpec& model, std::uint32_t streams,
             const QueueDecorator& decorate, const RelayDelays& delays)
    : model_(model),
      optimizer_(config.optimizer.options()),
      device_(make_host_device({.memory_bytes = config.memory.device_bytes.value_or(64_MiB),
                                .copy_bytes_per_second = delays.copy_bytes_per_second})) {
  if (delays.us_max != 0)
    device_ = make_delayed_device(std::move(device_), delays.seed, delays.us_max);
  engine_.reset(new Engine(EngineOverQueue::make(config, model_, *device_, decorate)));
  activations_ = std::make_unique<ActivationRelay>(*device_, model_.boundary_bytes);
  for (std::uint32_t i = 0; i < streams; ++i) streams_.emplace_back(*device_, "compute");
  engine_->initialize(toy_values());
  for (const TensorPlace& tensor : engine_->tensors())
    toy_values()(tensor, 0, masters_.emplace_back(kUnitElements));
}

std::vector<ActivationRelay::Use> Relay::uses_of(std::uint32_t micro_batches,
                                                 MicroBatchOrder order) const {
  std::vector<ActivationRelay::Use> uses;
  const auto count = static_cast<std::uint32_t>(model_.forward_order.size());
  const bool is_vertical = order == MicroBatchOrder::kVertical;
  for (std::uint32_t round = 0; round < (is_vertical ? 1 : micro_batches); ++round) {
    for (std::uint32_t i = 0; i < 2 * count; ++i) {
      for (std::uint32_t m = 0; m < (is_vertical ? micro_batches : 1); ++m)
        uses.push_back({.position = i < count ? i : 2 * count - 1 - i,
                        .micro_batch = is_vertical ? m : round,
                        .pass = i < count ? Pass::kForward : Pass::kBackward});
    }
  }
  return uses;
}

// The unit's parameters, on the stream of its lease.
void Relay::look_at(const Lease& lease) {
  std::vector<std::uint16_t> expected;
  for (const float master : masters_[index_of(lease.unit())])
    expected.push_back(split_master(master).high);
  device_->launch(streams_[0].id(), [this, parameters = lease.parameter(0), expected] {
    ++seen_;
    if (std::memcmp(parameters, expected.data(), kUnitElements * sizeof(std::uint16_t)) != 0)
      ++wrong_;
  });
}

template <class Acquire>
void Relay::hold(std::deque<Lease>& held, const Acquire& acquire) {
  let_go(held, model_.concurrent_leases - 1);
  held.push_back(acquire());
  look_at(held.back());
}

void Relay::let_go(std::deque<Lease>& held, std::size_t kept) {
  for (; held.size() > kept; held.pop_front()) look_at(held.front());
}

// An update without gradients.
void Relay::decay() {
  const std::vector<float> zeros(kUnitElements);
  std::vector<float> exp_avg(kUnitElements);
  std::vector<float> exp_avg_sq(kUnitElements);
  ++updates_;
  for (std::vector<float>& master : masters_) {
    const UpdateArrays arrays{.gradient_dtype = DType::kFp32,
                              .parameter = master.data(),
                              .exp_avg = exp_avg.data(),
                              .exp_avg_sq = exp_avg_sq.data(),
                              .gradient = reinterpret_cast<const std::byte*>(zeros.data()),
                              .element_count = kUnitElements};
    update_reference(coefficients_of(optimizer_, kLearningRate, updates_, 1), arrays);
  }
}

StepReport Relay::step(std::uint32_t micro_batches, MicroBatchOrder order) {
  activations_->begin_walk();
  Step step = engine_->begin_step(
      {.learning_rate = kLearningRate, .micro_batches = micro_batches, .order = order});
  walk(step, uses_of(micro_batches, order));
  StepReport report = step.finish();
  decay();
  return report;
}

// Two batches. The windows for several leases need not hold the last unit beside the first.
void Relay::evaluate() {
  Inference inference = engine_->begin_inference();
  std::deque<Lease> held;
  for (int batch = 0; batch < (model_.concurrent_leases == 1 ? 2 : 1); ++batch) {
    activations_->begin_walk();
    for (std::uint32_t i = 0; i < model_.forward_order.size(); ++i) {
      hold(held, [&] { return inference.acquire(model_.forward_order[i], streams_[0]); });
      activations_->run_use(inference, {.position = i, .pass = Pass::kInference}, next_stream());
    }
  }
  let_go(held, 0);
}

void Relay::abandon_after(std::uint32_t uses, std::uint32_t micro_batches, MicroBatchOrder order) {
  activations_->begin_walk();
  Step step = engine_->begin_step(
      {.learning_rate = kLearningRate, .micro_batches = micro_batches, .order = order});
  std::vector<ActivationRelay::Use> first = uses_of(micro_batches, order);
  first.resize(std::min<std::size_t>(uses, first.size()));
  walk(step, first);
}

void Relay::walk(Step& step, const std::vector<ActivationRelay::Use>& uses) {
  std::deque<Lease> held;
  for (const ActivationRelay::Use& use : uses) {
    hold(held,
         [&] { return step.acquire(model_.forward_order[use.position], use.pass, streams_[0]); });
    activations_->run_use(step, use, next_stream());
  }
  let_go(held, 0);
}

}  // namespace sluice::test
