#include "engine/step.h"

#include <utility>

#include "base/error.h"

namespace sluice {

Lease::Lease(Lease&& other) noexcept
    : loop_(std::exchange(other.loop_, nullptr)), layout_(other.layout_), use_(other.use_) {}

Lease& Lease::operator=(Lease&& other) noexcept {
  std::swap(loop_, other.loop_);
  std::swap(layout_, other.layout_);
  std::swap(use_, other.use_);
  return *this;
}

Lease::~Lease() {
  release();
}

void Lease::release() {
  if (loop_ != nullptr) std::exchange(loop_, nullptr)->release(use_);
}

const std::byte* Lease::parameter(std::size_t tensor) const {
  const auto tensors = layout_->tensors_of(use_.unit);
  SLUICE_CHECK(loop_ != nullptr && tensor < tensors.size(),
               "a tensor of the unit, while the lease is held");
  return use_.parameters + tensors[tensor].offset_elements * layout_->format().parameter_bytes();
}

std::byte* Lease::gradient(std::size_t tensor) const {
  const auto tensors = layout_->tensors_of(use_.unit);
  SLUICE_CHECK(loop_ != nullptr && tensor < tensors.size(),
               "a tensor of the unit, while the lease is held");
  SLUICE_CHECK(use_.gradients != nullptr,
               "only a backward lease has gradients, and not of a frozen unit");
  return use_.gradients + tensors[tensor].offset_elements * layout_->format().gradient_bytes();
}

ActivationLease::ActivationLease(ActivationLease&& other) noexcept
    : flow_(std::exchange(other.flow_, nullptr)), lease_(other.lease_) {}

ActivationLease& ActivationLease::operator=(ActivationLease&& other) noexcept {
  std::swap(flow_, other.flow_);
  std::swap(lease_, other.lease_);
  return *this;
}

ActivationLease::~ActivationLease() {
  release();
}

void ActivationLease::release() {
  if (flow_ != nullptr) std::exchange(flow_, nullptr)->release(lease_);
}

std::byte* ActivationLease::data() const {
  SLUICE_CHECK(flow_ != nullptr, "the lease has ended");
  return lease_.data;
}

Step::Step(Step&& other) noexcept
    : loop_(std::exchange(other.loop_, nullptr)),
      activations_(other.activations_),
      layout_(other.layout_) {}

Step::~Step() {
  if (loop_ == nullptr) return;
  activations_->abandon();
  loop_->abandon();
}

Lease Step::acquire(UnitId unit, Pass pass, const Stream& stream) {
  SLUICE_CHECK(loop_ != nullptr, "the step has been finished");
  return Lease(*loop_, *layout_, loop_->acquire(unit, pass, stream.id()));
}

ActivationLease Step::save(const ActivationRef& ref, const Stream& stream) {
  SLUICE_CHECK(loop_ != nullptr, "the step has been finished");
  return {*activations_, activations_->acquire(ref, ActivationAction::kSave, stream.id())};
}

ActivationLease Step::load(const ActivationRef& ref, const Stream& stream) {
  SLUICE_CHECK(loop_ != nullptr, "the step has been finished");
  return {*activations_, activations_->acquire(ref, ActivationAction::kLoad, stream.id())};
}

StepReport Step::finish() {
  SLUICE_CHECK(loop_ != nullptr, "the step has been finished");
  activations_->require_complete();
  StepReport report = loop_->finish_step();
  loop_ = nullptr;
  const ActivationFlow::Report activations = activations_->finish();
  report.activation_out_bytes = activations.out_bytes;
  report.activation_in_bytes = activations.in_bytes;
  return report;
}

Inference::Inference(Inference&& other) noexcept
    : loop_(std::exchange(other.loop_, nullptr)),
      activations_(other.activations_),
      layout_(other.layout_) {}

Inference::~Inference() {
  if (loop_ == nullptr) return;
  activations_->abandon();
  loop_->abandon();
}

Lease Inference::acquire(UnitId unit, const Stream& stream) {
  SLUICE_CHECK(loop_ != nullptr, "the inference has been moved from");
  return Lease(*loop_, *layout_, loop_->acquire(unit, Pass::kInference, stream.id()));
}

ActivationLease Inference::save(const ActivationRef& ref, const Stream& stream) {
  SLUICE_CHECK(loop_ != nullptr, "the inference has been moved from");
  return {*activations_, activations_->acquire(ref, ActivationAction::kSave, stream.id())};
}

ActivationLease Inference::load(const ActivationRef& ref, const Stream& stream) {
  SLUICE_CHECK(loop_ != nullptr, "the inference has been moved from");
  return {*activations_, activations_->acquire(ref, ActivationAction::kLoad, stream.id())};
}

}  // namespace sluice
