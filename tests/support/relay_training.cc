#include "tests/support/relay_training.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <sluice/units.h>
#include "base/optimizer_math.h"
#include "cpu_optim/optimizer_options.h"
#include "cpu_optim/update.h"
#include "engine/plan/layout.h"
#include "tests/support/delays.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

std::byte expected_byte(std::uint64_t key, std::uint64_t index) {
  std::uint64_t value = (key + index / 8) * 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 29)) * 0xbf58476d1ce4e5b9u;
  return static_cast<std::byte>((value ^ (value >> 32)) >> (index % 8 * 8));
}

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
  engine_ = std::make_unique<Engine>(config, model_, *device_, decorate);
  for (std::uint32_t i = 0; i < streams; ++i) streams_.emplace_back(*device_, "compute");
  engine_->initialize(toy_values());
  for (const TensorPlace& tensor : engine_->layout().tensors())
    toy_values()(tensor, 0, masters_.emplace_back(kUnitElements));
}

std::vector<Relay::Use> Relay::uses_of(std::uint32_t micro_batches, MicroBatchOrder order) const {
  std::vector<Use> uses;
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

std::uint64_t Relay::key_of(const ActivationRef& ref) const {
  return (((walk_number_ * 1000 + ref.boundary) * 1000 + ref.micro_batch) * 2 +
          (ref.kind == ActivationKind::kGradient ? 1 : 0))
         << 24;
}

void Relay::save(ActivationLease lease, const ActivationRef& ref, const Stream& stream) {
  device_->launch(stream.id(), [data = lease.data(), key = key_of(ref),
                                bytes = model_.boundary_bytes[ref.boundary]] {
    for (std::uint64_t i = 0; i < bytes; ++i) data[i] = expected_byte(key, i);
  });
}

void Relay::load(ActivationLease lease, const ActivationRef& ref, const Stream& stream) {
  device_->launch(stream.id(), [this, data = lease.data(), key = key_of(ref),
                                bytes = model_.boundary_bytes[ref.boundary]] {
    bool is_right = true;
    for (std::uint64_t i = 0; i < bytes && is_right; ++i)
      is_right = data[i] == expected_byte(key, i);
    ++seen_;
    if (!is_right) ++wrong_;
  });
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

template <class Walk>
void Relay::run_use(Walk& walk, const Use& use) {
  const Stream& stream = streams_[turn_++ % streams_.size()];
  const auto boundaries = static_cast<std::uint32_t>(model_.boundary_bytes.size());
  const auto value = [&](std::uint32_t boundary) {
    return ActivationRef{.boundary = boundary, .micro_batch = use.micro_batch};
  };
  const auto gradient = [&](std::uint32_t boundary) {
    return ActivationRef{
        .boundary = boundary, .micro_batch = use.micro_batch, .kind = ActivationKind::kGradient};
  };
  const auto load_it = [&](const ActivationRef& ref) { load(walk.load(ref, stream), ref, stream); };
  const auto save_it = [&](const ActivationRef& ref) { save(walk.save(ref, stream), ref, stream); };
  if (use.position > 0) load_it(value(use.position - 1));
  if (use.pass != Pass::kBackward) {
    if (use.position < boundaries) save_it(value(use.position));
  } else {
    if (use.position < boundaries) load_it(gradient(use.position));
    if (use.position > 0) save_it(gradient(use.position - 1));
  }
}

StepReport Relay::step(std::uint32_t micro_batches, MicroBatchOrder order) {
  ++walk_number_;
  Step step = engine_->begin_step(
      {.learning_rate = kLearningRate, .micro_batches = micro_batches, .order = order});
  walk(step, uses_of(micro_batches, order));
  StepReport report = step.finish();
  decay();
  return report;
}

void Relay::evaluate() {
  ++walk_number_;
  Inference inference = engine_->begin_inference();
  std::deque<Lease> held;
  for (std::uint32_t i = 0; i < model_.forward_order.size(); ++i) {
    hold(held, [&] { return inference.acquire(model_.forward_order[i], streams_[0]); });
    run_use(inference, {.position = i, .pass = Pass::kInference});
  }
  let_go(held, 0);
}

void Relay::abandon_after(std::uint32_t uses, std::uint32_t micro_batches, MicroBatchOrder order) {
  ++walk_number_;
  Step step = engine_->begin_step(
      {.learning_rate = kLearningRate, .micro_batches = micro_batches, .order = order});
  std::vector<Use> first = uses_of(micro_batches, order);
  first.resize(std::min<std::size_t>(uses, first.size()));
  walk(step, first);
}

void Relay::walk(Step& step, const std::vector<Use>& uses) {
  std::deque<Lease> held;
  for (const Use& use : uses) {
    hold(held,
         [&] { return step.acquire(model_.forward_order[use.position], use.pass, streams_[0]); });
    run_use(step, use);
  }
  let_go(held, 0);
}

}  // namespace sluice::test
