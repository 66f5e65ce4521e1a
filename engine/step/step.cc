#include <sluice/step.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/error.h>
#include "engine/flow/activation_flow.h"
#include "engine/plan/activation_plan.h"
#include "engine/plan/layout.h"
#include "engine/step/step_loop.h"

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

// Where the tensor begins in its unit.
std::uint64_t Lease::offset_elements(const char* call, std::size_t tensor) const {
  const UnitPlace& unit = layout_->unit(use_.unit);
  if (loop_ == nullptr)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: the lease on unit \"{}\" has been released or moved from; acquire "
                            "the unit again",
                            call, unit.name));
  if (tensor >= unit.tensor_count)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: tensor {} of unit \"{}\" does not exist; the unit has {}, in the "
                            "order of UnitSpec::tensors, from 0 on",
                            call, tensor, unit.name, unit.tensor_count));
  return layout_->tensors_of(use_.unit)[tensor].offset_elements;
}

const std::byte* Lease::parameter(std::size_t tensor) const {
  return use_.parameters +
         offset_elements("parameter", tensor) * layout_->format().parameter_bytes();
}

std::byte* Lease::gradient(std::size_t tensor) const {
  const std::uint64_t offset = offset_elements("gradient", tensor);
  if (use_.gradients == nullptr) {
    const UnitPlace& unit = layout_->unit(use_.unit);
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("gradient: unit \"{}\" {}", unit.name,
                            unit.is_frozen ? "is frozen, so it has none"
                                           : "is not leased for backward; acquire it with "
                                             "Pass::kBackward"));
  }
  return use_.gradients + offset * layout_->format().gradient_bytes();
}

namespace {

void require_dtype(const char* call, const char* key, DType asked, DType kept) {
  if (asked == kept) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}: elements of {} were asked for, but {} is {}; ask for those, or set "
                          "the key",
                          call, name_of(asked), key, name_of(kept)));
}

}  // namespace

void Lease::require_parameter_dtype(DType asked) const {
  require_dtype("parameter", "precision.parameters", asked, layout_->format().parameter);
}

void Lease::require_gradient_dtype(DType asked) const {
  require_dtype("gradient", "precision.gradients", asked, layout_->format().gradient);
}

std::size_t Lease::tensor(std::string_view name) const {
  const auto tensors = layout_->tensors_of(use_.unit);
  const auto found = std::ranges::find(tensors, name, &TensorPlace::name);
  if (found != tensors.end()) return static_cast<std::size_t>(found - tensors.begin());
  std::vector<std::string> names;
  for (const TensorPlace& tensor : tensors) names.push_back(tensor.name);
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("tensor: unit \"{}\" has no tensor \"{}\"; it has: {}",
                          layout_->unit(use_.unit).name, name, fmt::join(names, ", ")));
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
  if (flow_ == nullptr)
    throw Error(ErrorCode::kInvalidArgument,
                "data: the lease on the activation has been released or moved from; load it again");
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

StepLoop& Step::loop(const char* call) const {
  if (loop_ != nullptr) return *loop_;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("{}: the step is over, finished or moved from; Engine::begin_step() gives "
                  "the next one",
                  call));
}

Lease Step::acquire(UnitId unit, Pass pass, const Stream& stream) {
  StepLoop& step = loop("acquire");
  return Lease(step, *layout_, step.acquire(unit, pass, stream.id()));
}

ActivationLease Step::save(const ActivationRef& ref, const Stream& stream) {
  (void)loop("save");
  return {*activations_, activations_->acquire(ref, ActivationAction::kSave, stream.id())};
}

ActivationLease Step::load(const ActivationRef& ref, const Stream& stream) {
  (void)loop("load");
  return {*activations_, activations_->acquire(ref, ActivationAction::kLoad, stream.id())};
}

double Step::loss_scale() const {
  return loop("loss_scale").loss_scale();
}

std::uint64_t Step::number() const {
  return loop("number").scheduled_step() + 1;
}

StepReport Step::finish(const FinishOptions& options) {
  (void)loop("finish");
  activations_->require_complete();
  StepReport report = loop_->finish_step(options);
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

StepLoop& Inference::loop(const char* call) const {
  if (loop_ != nullptr) return *loop_;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}: the inference has been moved from; Engine::begin_inference() gives "
                          "the next one",
                          call));
}

Lease Inference::acquire(UnitId unit, const Stream& stream) {
  StepLoop& inference = loop("acquire");
  return Lease(inference, *layout_, inference.acquire(unit, Pass::kInference, stream.id()));
}

ActivationLease Inference::save(const ActivationRef& ref, const Stream& stream) {
  (void)loop("save");
  return {*activations_, activations_->acquire(ref, ActivationAction::kSave, stream.id())};
}

ActivationLease Inference::load(const ActivationRef& ref, const Stream& stream) {
  (void)loop("load");
  return {*activations_, activations_->acquire(ref, ActivationAction::kLoad, stream.id())};
}

}  // namespace sluice
