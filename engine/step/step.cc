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
#include "engine/step/engine_link.h"
#include "engine/step/step_loop.h"

namespace sluice {
namespace {

[[noreturn]] void refuse(const char* call, const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: {}", call, message));
}

// A step or an inference, unless it is over.
EngineLink& open_link(const std::shared_ptr<EngineLink>& link, std::uint64_t walk, const char* call,
                      const char* walk_name) {
  if (link == nullptr)
    refuse(call,
           fmt::format("the {} has been moved from; use the object that it was moved to, or begin "
                       "another with Engine::begin_{}()",
                       walk_name, walk_name));
  if (link->loop == nullptr)
    refuse(call, fmt::format("the {} is over, because its engine has been destroyed; keep the "
                             "engine until the end",
                             walk_name));
  if (link->walk != walk)
    refuse(call, fmt::format("the {} is over; Engine::begin_{}() gives the next one", walk_name,
                             walk_name));
  return *link;
}

}  // namespace

Lease::Lease(std::shared_ptr<EngineLink> link, const LeasedUse& use)
    : link_(std::move(link)), walk_(link_->walk), use_(use) {}

Lease::Lease(Lease&& other) noexcept
    : link_(std::move(other.link_)),
      walk_(other.walk_),
      is_released_(other.is_released_),
      use_(other.use_) {}

Lease& Lease::operator=(Lease&& other) noexcept {
  std::swap(link_, other.link_);
  std::swap(walk_, other.walk_);
  std::swap(is_released_, other.is_released_);
  std::swap(use_, other.use_);
  return *this;
}

Lease::~Lease() {
  release();
}

void Lease::release() {
  if (link_ == nullptr || std::exchange(is_released_, true)) return;
  if (link_->is_open(walk_)) link_->loop->release(use_);
}

const Layout& Lease::layout(const char* call) const {
  if (link_ == nullptr)
    refuse(call,
           "the lease has been moved from; use the object that it was moved to, or acquire again");
  if (link_->loop == nullptr)
    refuse(call, fmt::format("the lease on unit {} is over, because its engine has been destroyed; "
                             "keep the engine until the end",
                             index_of(use_.unit)));
  const std::string& unit = link_->layout->unit(use_.unit).name;
  if (is_released_)
    refuse(call,
           fmt::format("the lease on unit \"{}\" has been released; acquire the unit again", unit));
  if (link_->walk != walk_)
    refuse(call, fmt::format("the lease on unit \"{}\" ended with its step; acquire the unit again "
                             "in the next step",
                             unit));
  return *link_->layout;
}

// Where the tensor begins in its unit.
std::uint64_t Lease::offset_elements(const char* call, std::size_t tensor) const {
  const Layout& all = layout(call);
  const UnitPlace& unit = all.unit(use_.unit);
  if (tensor >= unit.tensor_count)
    refuse(call, fmt::format("tensor {} of unit \"{}\" does not exist; the unit has {}, in the "
                             "order of UnitSpec::tensors, from 0 on",
                             tensor, unit.name, unit.tensor_count));
  return all.tensors_of(use_.unit)[tensor].offset_elements;
}

const std::byte* Lease::parameter(std::size_t tensor) const {
  return use_.parameters +
         offset_elements("parameter", tensor) * layout("parameter").format().parameter_bytes();
}

std::byte* Lease::gradient(std::size_t tensor) const {
  const std::uint64_t offset = offset_elements("gradient", tensor);
  const Layout& all = layout("gradient");
  if (use_.gradients == nullptr) {
    const UnitPlace& unit = all.unit(use_.unit);
    refuse("gradient",
           fmt::format("unit \"{}\" {}", unit.name,
                       unit.is_frozen ? "is frozen, so it has none; train it "
                                        "(UnitSpec::is_frozen), or leave its gradients out"
                                      : "is not leased for backward; acquire it with "
                                        "Pass::kBackward"));
  }
  return use_.gradients + offset * all.format().gradient_bytes();
}

namespace {

void require_dtype(const char* call, const char* key, DType asked, DType kept) {
  if (asked == kept) return;
  refuse(call, fmt::format("elements of {} were asked for, but {} is {}; ask for those, or set the "
                           "key",
                           name_of(asked), key, name_of(kept)));
}

}  // namespace

void Lease::require_parameter_dtype(DType asked) const {
  require_dtype("parameter", "precision.parameters", asked, layout("parameter").format().parameter);
}

void Lease::require_gradient_dtype(DType asked) const {
  require_dtype("gradient", "precision.gradients", asked, layout("gradient").format().gradient);
}

std::size_t Lease::tensor(std::string_view name) const {
  const Layout& all = layout("tensor");
  const auto tensors = all.tensors_of(use_.unit);
  const auto found = std::ranges::find(tensors, name, &TensorPlace::name);
  if (found != tensors.end()) return static_cast<std::size_t>(found - tensors.begin());
  std::vector<std::string> names;
  for (const TensorPlace& tensor : tensors) names.push_back(tensor.name);
  refuse("tensor", fmt::format("unit \"{}\" has no tensor \"{}\"; it has: {}",
                               all.unit(use_.unit).name, name, fmt::join(names, ", ")));
}

ActivationLease::ActivationLease(std::shared_ptr<EngineLink> link, const LeasedActivation& lease)
    : link_(std::move(link)), walk_(link_->walk), lease_(lease) {}

ActivationLease::ActivationLease(ActivationLease&& other) noexcept
    : link_(std::move(other.link_)),
      walk_(other.walk_),
      is_released_(other.is_released_),
      lease_(other.lease_) {}

ActivationLease& ActivationLease::operator=(ActivationLease&& other) noexcept {
  std::swap(link_, other.link_);
  std::swap(walk_, other.walk_);
  std::swap(is_released_, other.is_released_);
  std::swap(lease_, other.lease_);
  return *this;
}

ActivationLease::~ActivationLease() {
  release();
}

void ActivationLease::release() {
  if (link_ == nullptr || std::exchange(is_released_, true)) return;
  if (link_->is_open(walk_)) link_->activations->release(lease_);
}

std::byte* ActivationLease::data() const {
  const char* const why = link_ == nullptr         ? "been moved from"
                          : is_released_           ? "been released"
                          : link_->loop == nullptr ? "ended with its engine"
                          : !link_->is_open(walk_) ? "ended with its step"
                                                   : nullptr;
  if (why != nullptr)
    refuse("data",
           fmt::format("the lease on an activation has {}; load the activation again", why));
  return lease_.data;
}

namespace {

LeasedActivation access(EngineLink& link, const ActivationRef& ref, ActivationAction action,
                        const Stream& stream) {
  link.require_stream(action == ActivationAction::kSave ? "save" : "load", stream);
  return link.activations->acquire(ref, action, stream.id());
}

}  // namespace

Step::Step(std::shared_ptr<EngineLink> link) : link_(std::move(link)), walk_(++link_->walk) {}

Step::Step(Step&& other) noexcept : link_(std::move(other.link_)), walk_(other.walk_) {}

Step::~Step() {
  if (link_ != nullptr) link_->abandon(walk_);
}

EngineLink& Step::link(const char* call) const {
  return open_link(link_, walk_, call, "step");
}

std::vector<UnitId> Step::announce(std::span<const UnitId> units, Pass pass) {
  const CallGuard guard(link_, "announce");
  return link("announce").loop->announce(units, pass);
}

Lease Step::acquire(UnitId unit, Pass pass, const Stream& stream) {
  const CallGuard guard(link_, "acquire");
  EngineLink& step = link("acquire");
  step.require_stream("acquire", stream);
  return {link_, step.loop->acquire(unit, pass, stream.id())};
}

ActivationLease Step::save(const ActivationRef& ref, const Stream& stream) {
  const CallGuard guard(link_, "save");
  return {link_, access(link("save"), ref, ActivationAction::kSave, stream)};
}

ActivationLease Step::load(const ActivationRef& ref, const Stream& stream) {
  const CallGuard guard(link_, "load");
  return {link_, access(link("load"), ref, ActivationAction::kLoad, stream)};
}

double Step::loss_scale() const {
  return link("loss_scale").loop->loss_scale();
}

std::uint64_t Step::number() const {
  return link("number").loop->scheduled_step() + 1;
}

double Step::gradient_norm(std::optional<double> gradient_divisor) {
  const CallGuard guard(link_, "gradient_norm");
  return link("gradient_norm").loop->gradient_norm(gradient_divisor);
}

StepReport Step::finish(const FinishOptions& options) {
  const CallGuard guard(link_, "finish");
  EngineLink& step = link("finish");
  step.activations->require_complete();
  StepReport report = step.loop->finish_step(options);
  ++step.walk;
  const ActivationReport activations = step.activations->finish();
  report.activation_out_bytes = activations.out_bytes;
  report.activation_in_bytes = activations.in_bytes;
  return report;
}

Inference::Inference(std::shared_ptr<EngineLink> link)
    : link_(std::move(link)), walk_(++link_->walk) {}

Inference::Inference(Inference&& other) noexcept
    : link_(std::move(other.link_)), walk_(other.walk_) {}

Inference::~Inference() {
  if (link_ != nullptr) link_->abandon(walk_);
}

EngineLink& Inference::link(const char* call) const {
  return open_link(link_, walk_, call, "inference");
}

std::vector<UnitId> Inference::announce(std::span<const UnitId> units) {
  const CallGuard guard(link_, "announce");
  return link("announce").loop->announce(units, Pass::kInference);
}

Lease Inference::acquire(UnitId unit, const Stream& stream) {
  const CallGuard guard(link_, "acquire");
  EngineLink& inference = link("acquire");
  inference.require_stream("acquire", stream);
  return {link_, inference.loop->acquire(unit, Pass::kInference, stream.id())};
}

ActivationLease Inference::save(const ActivationRef& ref, const Stream& stream) {
  const CallGuard guard(link_, "save");
  EngineLink& inference = link("save");
  inference.activations->begin_again();  // another batch
  return {link_, access(inference, ref, ActivationAction::kSave, stream)};
}

ActivationLease Inference::load(const ActivationRef& ref, const Stream& stream) {
  const CallGuard guard(link_, "load");
  return {link_, access(link("load"), ref, ActivationAction::kLoad, stream)};
}

}  // namespace sluice
