#include <sluice/engine.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include <fmt/format.h>

#include <sluice/error.h>
#include "base/topology.h"
#include "base/trace/trace_ranges.h"
#include "engine/checkpoint/checkpoint_writer.h"
#include "engine/flow/activation_flow.h"
#include "engine/plan/parameter_groups.h"
#include "engine/ranks/rank_clocks.h"
#include "engine/run/engine_trace.h"
#include "engine/run/run_description.h"
#include "engine/run/scheduler.h"
#include "engine/run/worker.h"
#include "engine/step/step_loop.h"
#include "engine/store/block_store.h"
#include "engine/store/state_access.h"
#include "engine/store/storage_queue.h"
#include "engine/store/tiers.h"
#include "io/direct_file.h"

namespace sluice {
namespace {

constexpr std::string_view kStateSource = "where a state comes from";

Config checked(Config config) {
  validate(config);
  config.threads = granted_threads(config.threads);
  if (config.precision.scale_moves()) config.optimizer.non_finite = NonFinitePolicy::kSkip;
  return config;
}

// What every rank may take, with what it has taken for votes: windows and homes have to be equal.
std::uint64_t device_bytes_of(const Config& config, const Device& device, Ranks& ranks) {
  const std::uint64_t own = config.memory.device_bytes.value_or(
      device.capacity_bytes() - device.allocated_bytes() + ranks.device_bytes());
  RankRange range(own);
  ranks.all_reduce({}, std::span(&range, 1), "device memory");
  return range.least;
}

Budgets budgets_of(const Config& config, const Device& device, Ranks& ranks) {
  return {.device_bytes = device_bytes_of(config, device, ranks),
          .host_bytes = config.memory.host_bytes.value_or(topology().memory_bytes / 2)};
}

// "auto" takes a second copy of the state only where it helps, and is no burden: where every block
// has one, since the others' records would be read after backward instead of during it, and where
// as much as both copies take stays free beside them, whichever path it comes to.
bool has_room_for_shadows(const Config& config, const Layout& layout, Placement placement) {
  if (config.optimizer.clip_norm == 0 && config.optimizer.non_finite == NonFinitePolicy::kStop)
    return false;  // "auto" means eager
  if (!shadows_serve_all(layout, placement)) return false;
  add_shadows(layout, placement);
  return std::ranges::all_of(config.storage.paths, [&](const std::string& path) {
    return free_bytes(path) >= 2 * placement.nvme_bytes();
  });
}

}  // namespace

// The ranks' collectives outlive the engine: what they have been told of it has to be taken back.
struct RanksHold {
  explicit RanksHold(Ranks& held) : ranks(held) {}
  RanksHold(const RanksHold&) = delete;
  RanksHold& operator=(const RanksHold&) = delete;
  ~RanksHold() {
    ranks.on_failure({});
    ranks.forget_memory();
  }

  Ranks& ranks;
};

// Built from top to bottom; torn down from bottom to top, so that whatever still runs finds what it
// uses.
struct Engine::Parts {
  Parts(const Config& given_config, const ModelSpec& given_model, Device& device,
        const QueueDecorator& decorate, Collectives* collectives)
      : config(checked(given_config)),
        model(validated(given_model)),
        ranks(config.sharding, collectives, device),
        layout(model, state_format(config), config.storage.block_elements,
               ParameterGroups(config.optimizer, model).set_of_tensors(), ranks.shard()),
        placement(placement_of(config, model, layout, device, ranks)),
        tiers(layout, placement, config.storage, device),
        queue(open_queue(config, placement, tiers, decorate, notes)),
        store(config.storage, layout, tiers, *queue, scheduler),
        worker(config.threads, scheduler),
        loop(config, model, layout, placement, tiers, store, *queue, device, scheduler, worker,
             ranks),
        activations(model, placement, tiers, store, device, scheduler, loop.timeline()),
        state(layout, placement, tiers, store, device, scheduler) {
    if (std::vector<std::string> names; trace_ranges_are_on) {
      for (const UnitSpec& unit : model.units) names.push_back(unit.name);
      name_trace_units(names);
    }
    ranks.on_failure([this](const Error& error) { scheduler.fail(error); });
    ranks.require_agreement(describe_run(config, model, layout, placement,
                                         tiers.device_memory().size(), loop.scheduled_step()),
                            "what is trained, and how");
    ranks.use_memory(tiers.device_memory());
    if (trace_enabled()) trace_section("engine", describe_engine(config, model, layout, placement));
    // Those that do not trace take part in it.
    if (ranks.are_several() && any_rank_traces(ranks))
      trace_section("clock", describe_clock(ranks));
  }

  static Placement placement_of(const Config& config, const ModelSpec& model, const Layout& layout,
                                const Device& device, Ranks& ranks) {
    check_homes(config.sharding, ranks.count(), config.placement);
    const OverlapPolicy policy = config.optimizer.overlap;
    Placement placement =
        plan_placement(layout, model, config.placement, budgets_of(config, device, ranks),
                       pass_needs(config, layout, ranks.count(), device.has_own_memory()));
    ranks.reserve(config.sharding, layout);
    SLUICE_CHECK(ranks.device_bytes() == placement.rank_buffer_bytes,
                 "the plan counts what ranks take");
    if (policy == OverlapPolicy::kSpeculative ||
        (policy == OverlapPolicy::kAuto && has_room_for_shadows(config, layout, placement)))
      add_shadows(layout, placement);
    return placement;
  }

  static std::unique_ptr<IoQueue> open_queue(const Config& config, const Placement& placement,
                                             const Tiers& tiers, const QueueDecorator& decorate,
                                             std::vector<std::string>& notes) {
    std::string explanation;
    std::vector<int> files;
    for (const DirectFile& file : tiers.files()) files.push_back(file.descriptor());
    const TransferPool pool{
        .transfers_max = placement.parameter_slots.count + placement.lanes.count +
                         placement.lane_gradients.count + placement.activation_staging.count +
                         placement.gradient_staging.count,
        .memory = placement.nvme_bytes() == 0 ? std::span<std::byte>() : tiers.transfer_memory(),
        .files = files};
    auto queue = open_io_queue(config.storage, pool, explanation);
    if (!explanation.empty() && placement.nvme_bytes() != 0) notes.push_back(explanation);
    return decorate ? decorate(std::move(queue)) : std::move(queue);
  }

  // Fills in what other ranks own of elements [first_element, ...) of a tensor.
  void complete(TensorId id, StateKind kind, std::uint64_t first_element,
                std::span<std::byte> target) {
    if (!ranks.shard_optimizer()) return;
    const TensorPlace& tensor = layout.tensor(id);
    const std::uint64_t element_bytes =
        kind == StateKind::kParameter ? layout.format().parameter_bytes() : sizeof(float);
    const std::uint64_t shard = layout.unit(tensor.unit).shard_elements;
    const std::uint64_t begin = tensor.offset_elements + first_element;
    const std::uint64_t end = begin + target.size() / element_bytes;
    for (std::uint64_t at = begin; at < end;) {
      const std::uint64_t next = std::min(end, (at / shard + 1) * shard);
      ranks.broadcast(target.subspan((at - begin) * element_bytes, (next - at) * element_bytes),
                      static_cast<std::uint32_t>(at / shard), tensor.name);
      at = next;
    }
  }

  void require_idle(const char* call) {
    if (is_closed)
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}: the engine has been closed; make a new one", call));
    loop.throw_if_unusable();
    if (loop.is_active())
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}: a step or an inference is still active", call));
    if (!is_initialized)
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}: the state has no values yet; call initialize() first", call));
  }

  StateDescription description() const {
    return describe_state(model, config.precision.parameters, config.optimizer.kind);
  }

  void fill(StateSource& source, const char* call) {
    if (is_initialized)
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}: the state has its values already; make a new engine", call));
    ranks.together(kStateSource, [&] { source.prepare(description()); });
    const StatePosition position = source.position();
    const LossScaleState scale = position.loss_scale.value_or(LossScaleState{});
    ranks.require_agreement(
        fmt::format("step {}, loss scale {} {} {} {}", position.step,
                    position.loss_scale.has_value(), scale.scale, scale.hysteresis_left,
                    scale.good_steps),
        "where training goes on");
    ranks.together(kStateSource, [&] { state.restore(source); });
    loop.restore(position);
    state.lend_homes();
    if (ranks.shard_optimizer()) loop.share_residents();
    loop.return_buffers();
    is_initialized = true;
  }

  std::vector<std::string> notes;
  Config config;
  ModelSpec model;
  Ranks ranks;
  Layout layout;
  Placement placement;
  Tiers tiers;
  Scheduler scheduler;
  std::unique_ptr<IoQueue> queue;
  BlockStore store;
  Worker worker;
  StepLoop loop;
  ActivationFlow activations;
  StateAccess state;
  bool is_initialized = false;
  bool is_closed = false;
  std::function<void(const std::string&)> last_words;
  RanksHold ranks_hold{ranks};  // last: a constructor that throws lets go of them, too
};

Engine::Engine(const Config& config, const ModelSpec& model, Device& device,
               const QueueDecorator& decorate, Collectives* ranks)
    : parts_(std::make_unique<Parts>(config, model, device, decorate, ranks)) {}

Engine::~Engine() {
  parts_->activations.abandon();
  parts_->loop.abandon();
  parts_->loop.settle();
  parts_->activations.settle();
  if (trace_enabled()) trace_section("store", describe_counters(parts_->queue->counters()));
  if (!parts_->last_words) return;
  try {
    if (const auto words = parts_->loop.unheard_failure()) parts_->last_words(*words);
  } catch (...) {
    // Whoever was to hear it could not.
  }
}

void Engine::initialize(const InitialValues& values) {
  if (!values)
    throw Error(ErrorCode::kInvalidArgument,
                "initialize: the function that gives the initial values is empty");
  InitialSource source(values);
  parts_->fill(source, "initialize");
}

void Engine::restore(StateSource& source) {
  parts_->fill(source, "restore");
}

SavedCheckpoint Engine::save(const std::string& root, const SaveOptions& options) {
  parts_->require_idle("save");
  parts_->loop.lend_buffers();
  SaveOptions all = options;
  all.hyperparameters.merge(hyperparameters_of(parts_->config.optimizer));
  const StateDescription description = parts_->description();
  CheckpointWriter writer(parts_->layout, description, parts_->state, parts_->ranks);
  try {
    SavedCheckpoint saved = writer.save(root, parts_->loop.position(), all);
    parts_->loop.return_buffers();
    return saved;
  } catch (...) {
    parts_->loop.return_buffers();
    throw;
  }
}

std::string Engine::share(const std::string& text) {
  return parts_->ranks.share(text, "what rank 0 has to say");
}

StatePosition Engine::position() {
  parts_->require_idle("position");
  parts_->loop.drain();
  return parts_->loop.position();
}

Step Engine::begin_step(const StepOptions& options) {
  parts_->require_idle("begin_step");
  parts_->state.invalidate();
  const ActivationPlan& activations = parts_->loop.activations(options);
  parts_->loop.begin_step(options);
  Step step(parts_->loop, parts_->activations, parts_->layout);
  parts_->activations.begin(activations, parts_->loop.scheduled_step() + 1);
  return step;
}

Inference Engine::begin_inference() {
  parts_->require_idle("begin_inference");
  parts_->loop.begin_inference();
  Inference inference(parts_->loop, parts_->activations, parts_->layout);
  parts_->activations.begin(parts_->loop.inference_activations(),
                            parts_->loop.scheduled_step() + 1);
  return inference;
}

void Engine::drain() {
  parts_->loop.drain();
}

void Engine::close() {
  if (parts_->loop.is_active())
    throw Error(ErrorCode::kInvalidArgument,
                "close: a step or an inference is still active; finish or destroy it first");
  parts_->is_closed = true;
  parts_->loop.drain();
}

void Engine::set_last_words(std::function<void(const std::string& message)> last_words) {
  parts_->last_words = std::move(last_words);
}

std::uint64_t Engine::applied_step() const {
  return parts_->loop.applied_step();
}

void Engine::read_state(TensorId tensor, StateKind kind, std::uint64_t first_element,
                        std::span<std::byte> target) {
  parts_->require_idle("read_state");
  parts_->state.check_read(tensor, kind, first_element, target.size());
  parts_->loop.lend_buffers();
  parts_->state.read(tensor, kind, first_element, target);
  parts_->complete(tensor, kind, first_element, target);
  parts_->loop.return_buffers();
}

std::vector<double> Engine::exchange(double own) {
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
        fmt::format("unit: the model has {} units, none of them \"{}\"", units.size(), name));
  return UnitId{static_cast<std::uint32_t>(found - units.begin())};
}

TensorId Engine::tensor(std::string_view name) const {
  const auto& tensors = parts_->layout.tensors();
  const auto found = std::ranges::find(tensors, name, &TensorPlace::name);
  if (found == tensors.end())
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("tensor: the model has {} tensors, none of them \"{}\"", tensors.size(), name));
  return found->id;
}

std::span<const TensorPlace> Engine::tensors() const {
  return layout().tensors();
}
const Layout& Engine::layout() const {
  return parts_->layout;
}
const Placement& Engine::placement() const {
  return parts_->placement;
}
Traffic Engine::predicted_traffic(std::uint32_t micro_batches, MicroBatchOrder order) {
  if (micro_batches == 0)
    throw Error(ErrorCode::kInvalidArgument,
                "predicted_traffic: micro_batches is 0; a step has at least one");
  return parts_->loop.predict_traffic(micro_batches, order);
}
std::vector<UnitTime> Engine::unit_times() const {
  return parts_->loop.timeline().unit_times();
}
std::span<const DirectFile> Engine::storage_files() const {
  return parts_->tiers.files();
}
const std::vector<std::string>& Engine::notes() const {
  return parts_->notes;
}

}  // namespace sluice
