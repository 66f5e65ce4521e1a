#include <sluice/engine.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/error.h>
#include "base/float_environment.h"
#include "base/trace/trace_recorder.h"
#include "engine/config/micro_batch_limit.h"
#include "engine/engine_access.h"
#include "engine/engine_over_queue.h"
#include "engine/engine_parts.h"
#include "engine/run/engine_trace.h"
#include "io/direct_file.h"

namespace sluice {

Engine::Engine(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

Engine::Engine(const Config& config, const ModelSpec& model, Device& device, Collectives* ranks)
    : Engine(Parts::make(config, model, device, QueueDecorator(), ranks)) {}

Engine EngineOverQueue::make(const Config& config, const ModelSpec& model, Device& device,
                             const QueueDecorator& decorate, Collectives* ranks) {
  return Engine(Engine::Parts::make(config, model, device, decorate, ranks));
}

Engine::~Engine() {
  const FloatEnvironment environment;
  parts_->link->abandon(parts_->link->walk);
  parts_->loop.settle();
  parts_->activations.settle();
  if (trace_enabled()) trace_section("store", describe_counters(parts_->queue->counters()));
  if (!parts_->last_words) return;
  try {
    if (const auto words = parts_->loop.unheard_failure()) parts_->last_words(*words);
  } catch (...) {
    // The handler itself has failed; there is no other.
  }
}

void Engine::initialize(const InitialValues& values) {
  const CallGuard guard(parts_->link, "initialize");
  if (!values)
    throw Error(ErrorCode::kInvalidArgument,
                "initialize: the function that gives the initial values is empty");
  if (parts_->durable && !parts_->durable->is_new())
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("initialize: the store \"{}\" holds the state of step {}; continue from it "
                    "with open_or_create(), choose another storage.state.name, or remove "
                    "the store with `sluice state remove`",
                    parts_->durable->name(), parts_->durable->record().step));
  InitialSource source(values);
  parts_->fill(source, {}, "initialize");
}

void Engine::restore(StateSource& source, const std::string& application) {
  const CallGuard guard(parts_->link, "restore");
  const auto units = parts_->layout.units();
  if (parts_->durable && !parts_->durable->is_new() &&
      std::ranges::any_of(units, &UnitPlace::is_frozen))
    throw Error(ErrorCode::kUnsupported,
                fmt::format("restore: the store \"{}\" keeps frozen units in one copy, which its "
                            "last commit names; choose another storage.state.name",
                            parts_->durable->name()));
  // The store's next commit is a state of this config.
  if (parts_->durable && !parts_->durable->is_new())
    parts_->loop.set_commit_settings(parts_->durable->accepted_settings(),
                                     parts_->durable->config_hash());
  parts_->fill(source, application, "restore");
}

void Engine::replace_values(std::span<const TensorId> tensors, const InitialValues& values) {
  const CallGuard guard(parts_->link, "replace_values");
  parts_->require_idle("replace_values");
  parts_->advance_save(SaveWait::kYes);  // which wants the values from before
  parts_->replace_values(tensors, values);
}

OpenedState Engine::open_or_create(const InitialValues& values, const OpenOptions& options) {
  const CallGuard guard(parts_->link, "open_or_create");
  parts_->require_durable("open_or_create");
  if (!values)
    throw Error(ErrorCode::kInvalidArgument,
                "open_or_create: the function that gives the initial values is empty");
  if (parts_->durable->is_new()) {
    InitialSource source(values);
    parts_->fill(source, options.application, "open_or_create");
    return {};
  }
  parts_->require_no_state("open_or_create");
  const CommitRecord& record = parts_->durable->record();
  OpenedState opened{.is_new = false, .step = record.step};
  opened.application = parts_->loop.committed().application;
  opened.changes = parts_->durable->changes();
  if (!opened.changes.empty() && !options.accepts_changes)
    throw Error(
        ErrorCode::kInput,
        fmt::format("the store \"{}\" was made with other numbers: {}; change them back, or "
                    "accept the change (accepts_changes, in Python accept_changes=True)",
                    parts_->durable->name(), fmt::join(opened.changes, "; ")));
  parts_->open_store();
  // Also where none has changed: an older version has not written all of them.
  parts_->loop.set_commit_settings(parts_->durable->accepted_settings(),
                                   parts_->durable->config_hash());
  return opened;
}

std::optional<std::uint64_t> Engine::committed_step() const {
  if (!parts_->durable) return std::nullopt;
  return parts_->loop.committed().step;
}

void Engine::commit_now() {
  const CallGuard guard(parts_->link, "commit_now");
  parts_->require_durable("commit_now");
  parts_->require_idle("commit_now");
  parts_->loop.commit_now();
}

std::string Engine::share(const std::string& text) {
  const CallGuard guard(parts_->link, "share");
  return parts_->ranks.share(text, "rank 0's text");
}

StatePosition Engine::position() {
  const CallGuard guard(parts_->link, "position");
  parts_->require_idle("position");
  parts_->loop.drain();
  return parts_->loop.position();
}

Step Engine::begin_step(const StepOptions& options) {
  const CallGuard guard(parts_->link, "begin_step");
  parts_->require_idle("begin_step");
  parts_->throw_save_failure();
  parts_->advance_save(SaveWait::kNo);
  parts_->state.invalidate();
  const ActivationPlan& activations = parts_->loop.activations(options);
  parts_->loop.begin_step(options);
  Step step(parts_->link);
  parts_->activations.begin(activations, parts_->loop.scheduled_step() + 1);
  return step;
}

Inference Engine::begin_inference() {
  const CallGuard guard(parts_->link, "begin_inference");
  parts_->require_idle("begin_inference");
  parts_->state.invalidate();
  parts_->loop.begin_inference();
  Inference inference(parts_->link);
  parts_->activations.begin(parts_->loop.inference_activations(),
                            parts_->loop.scheduled_step() + 1);
  return inference;
}

void Engine::drain() {
  const CallGuard guard(parts_->link, "drain");
  parts_->loop.drain();
}

void Engine::close() {
  const CallGuard guard(parts_->link, "close");
  if (parts_->loop.is_active())
    throw Error(ErrorCode::kInvalidArgument,
                "close: a step or an inference is still active; finish or destroy it first");
  const bool commits = parts_->durable && parts_->is_initialized && !parts_->is_closed;
  parts_->is_closed = true;
  parts_->advance_save(SaveWait::kYes);
  if (commits)
    parts_->loop.commit_now();
  else
    parts_->loop.drain();
  parts_->throw_save_failure();
}

void Engine::set_norm_group(NormGroup group) {
  const CallGuard guard(parts_->link, "set_norm_group");
  if (parts_->loop.is_active())
    throw Error(ErrorCode::kInvalidArgument,
                "set_norm_group: a step or an inference is active; finish or destroy it first");
  CountedTensors counted;
  parts_->ranks.together("the norm group", [&] {
    if (!group.add && !group.counted_elsewhere.empty())
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("set_norm_group: {} tensors count elsewhere, but there is no "
                              "function that adds over the group",
                              group.counted_elsewhere.size()));
    if (!group.counted_elsewhere.empty())
      counted.is_elsewhere.resize(parts_->layout.tensors().size(), false);
    for (const TensorId tensor : group.counted_elsewhere)
      counted.is_elsewhere[index_of(parts_->layout.tensor(tensor).id)] = true;
  });
  std::string names;
  for (const TensorPlace& tensor : parts_->layout.tensors())
    if (!counted.count_here(tensor.id) && !parts_->layout.unit(tensor.unit).is_local)
      names += tensor.name + "\n";
  if (parts_->ranks.are_several())
    parts_->ranks.require_agreement(group.add ? "with a group\n" + names : "without a group",
                                    "the norm group and the tensors that count elsewhere");
  parts_->counted = std::move(counted);
  parts_->loop.set_norm_group(std::move(group));
}

void Engine::set_last_words(std::function<void(const std::string& message)> last_words) {
  parts_->last_words = std::move(last_words);
}

std::uint64_t Engine::applied_step() const {
  return parts_->loop.applied_step();
}

void Engine::read_state(TensorId tensor, StateKind kind, std::uint64_t first_element,
                        std::span<std::byte> target) {
  const CallGuard guard(parts_->link, "read_state");
  parts_->require_idle("read_state");
  parts_->state.check_read(tensor, kind, first_element, target.size());
  parts_->loop.lend_buffers();
  try {
    parts_->read(tensor, kind, first_element, target);
  } catch (...) {
    parts_->loop.return_buffers();
    throw;
  }
  parts_->loop.return_buffers();
}

std::vector<double> Engine::exchange(double own) {
  const CallGuard guard(parts_->link, "exchange");
  const std::vector<std::byte> all =
      parts_->ranks.exchange(std::as_bytes(std::span(&own, 1)), "the ranks' values");
  std::vector<double> values(parts_->ranks.count());
  std::memcpy(values.data(), all.data(), all.size());
  return values;
}

std::uint32_t Engine::rank() const {
  return parts_->ranks.rank();
}
std::uint32_t Engine::rank_count() const {
  return parts_->ranks.count();
}

UnitId Engine::unit(std::string_view name) const {
  const std::vector<UnitSpec>& units = parts_->model.units;
  const auto found = std::ranges::find(units, name, &UnitSpec::name);
  if (found == units.end())
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("unit: the model has {} units, but none is \"{}\"", units.size(), name));
  return UnitId{static_cast<std::uint32_t>(found - units.begin())};
}

TensorId Engine::tensor(std::string_view name) const {
  const auto& tensors = parts_->layout.tensors();
  const auto found = std::ranges::find(tensors, name, &TensorPlace::name);
  if (found == tensors.end())
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("tensor: the model has {} tensors, but none is \"{}\"", tensors.size(), name));
  return found->id;
}

std::span<const TensorPlace> Engine::tensors() const {
  return parts_->layout.tensors();
}
Traffic Engine::predicted_traffic(std::uint32_t micro_batches, MicroBatchOrder order) {
  const CallGuard guard(parts_->link, "predicted_traffic");
  if (micro_batches == 0)
    throw Error(ErrorCode::kInvalidArgument,
                "predicted_traffic: micro_batches is 0; a step has at least one");
  if (micro_batches > kMicroBatchesMax)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("predicted_traffic: micro_batches is {}; a step has at most {}",
                            micro_batches, kMicroBatchesMax));
  return parts_->loop.predict_traffic(micro_batches, order);
}
std::vector<UnitTime> Engine::unit_times() const {
  return parts_->loop.timeline().unit_times();
}
const std::vector<std::string>& Engine::storage_paths() const {
  return parts_->config.storage.paths;
}
const std::vector<std::string>& Engine::notes() const {
  return parts_->notes;
}

const Layout& EngineAccess::layout(const Engine& engine) {
  return engine.parts_->layout;
}
const Placement& EngineAccess::placement(const Engine& engine) {
  return engine.parts_->placement;
}
std::span<const DirectFile> EngineAccess::storage_files(const Engine& engine) {
  return engine.parts_->tiers.files();
}

}  // namespace sluice
