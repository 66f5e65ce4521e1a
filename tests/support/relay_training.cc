#include "tests/support/relay_training.h"

#include <utility>

#include "base/units.h"

namespace sluice::test {
namespace {

std::byte expected_byte(std::uint64_t key, std::uint64_t index) {
  std::uint64_t value = (key + index / 8) * 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 29)) * 0xbf58476d1ce4e5b9u;
  return static_cast<std::byte>((value ^ (value >> 32)) >> (index % 8 * 8));
}

}  // namespace

ModelSpec relay_model(std::uint32_t units, std::vector<std::uint64_t> boundary_bytes,
                      std::uint32_t leases, bool is_tied) {
  ModelSpec model;
  for (std::uint32_t i = 0; i < units; ++i) {
    const std::string name = "u" + std::to_string(i);
    model.units.push_back(
        {.name = name, .tensors = {{.name = name + ".w", .shape = {1000}}}});
    model.forward_order.push_back(UnitId{i});
  }
  if (is_tied) model.forward_order.push_back(UnitId{0});
  model.concurrent_leases = leases;
  model.boundary_bytes = std::move(boundary_bytes);
  return validated(model);
}

Relay::Relay(const Config& config, const ModelSpec& model, std::uint32_t streams,
             const QueueDecorator& decorate, const HostDeviceOptions& device)
    : model_(model),
      device_(make_host_device({.memory_bytes = config.memory.device_bytes.value_or(64_MiB),
                                .copy_bytes_per_second = device.copy_bytes_per_second})),
      engine_(std::make_unique<Engine>(config, model_, *device_, decorate)) {
  for (std::uint32_t i = 0; i < streams; ++i) streams_.emplace_back(*device_, "compute");
  engine_->initialize([](const TensorPlace&, std::uint64_t, std::span<float> values) {
    std::fill(values.begin(), values.end(), 0.5f);
  });
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
  Step step =
      engine_->begin_step({.learning_rate = 1e-3, .micro_batches = micro_batches, .order = order});
  for (const Use& use : uses_of(micro_batches, order)) {
    const Lease lease = step.acquire(model_.forward_order[use.position], use.pass, streams_[0]);
    run_use(step, use);
  }
  return step.finish();
}

void Relay::evaluate() {
  ++walk_number_;
  Inference inference = engine_->begin_inference();
  for (std::uint32_t i = 0; i < model_.forward_order.size(); ++i) {
    const Lease lease = inference.acquire(model_.forward_order[i], streams_[0]);
    run_use(inference, {.position = i, .pass = Pass::kInference});
  }
}

void Relay::abandon_after(std::uint32_t uses, std::uint32_t micro_batches, MicroBatchOrder order) {
  ++walk_number_;
  Step step =
      engine_->begin_step({.learning_rate = 1e-3, .micro_batches = micro_batches, .order = order});
  for (const Use& use : uses_of(micro_batches, order)) {
    if (uses-- == 0) return;
    const Lease lease = step.acquire(model_.forward_order[use.position], use.pass, streams_[0]);
    run_use(step, use);
  }
}

}  // namespace sluice::test
