#include "engine/engine.h"

#include <algorithm>

#include <fmt/format.h>

#include "base/error.h"
#include "base/topology.h"
#include "engine/storage_queue.h"
#include "io/direct_file.h"

namespace sluice {
namespace {

Config checked(Config config) {
  validate(config);
  config.threads = granted_threads(config.threads);
  return config;
}

Budgets budgets_of(const Config& config, const Device& device) {
  return {.device_bytes = config.memory.device_bytes.value_or(device.capacity_bytes() -
                                                              device.allocated_bytes()),
          .host_bytes = config.memory.host_bytes.value_or(topology().memory_bytes / 2)};
}

// "auto" takes a second copy of the state only where it is no burden: where as much as both copies
// take stays free beside them, whichever path it comes to.
bool has_room_for_shadows(const Config& config, const Layout& layout, Placement placement) {
  if (config.optimizer.clip_norm == 0 && config.optimizer.non_finite == NonFinitePolicy::kStop)
    return false;  // "auto" means eager
  add_shadows(layout, placement);
  return placement.shadow_bytes != 0 &&
         std::ranges::all_of(config.storage.paths, [&](const std::string& path) {
           return free_bytes(path) >= 2 * placement.nvme_bytes();
         });
}

}  // namespace

// Built from top to bottom; torn down from bottom to top, so that whatever still runs finds what it
// uses.
struct Engine::Parts {
  Parts(const Config& given_config, const ModelSpec& given_model, Device& device,
        const QueueDecorator& decorate)
      : config(checked(given_config)),
        model(validated(given_model)),
        layout(model, state_format(config), config.storage.block_elements,
               ParameterGroups(config.optimizer, model).set_of_tensors()),
        placement(placement_of(config, model, layout, device)),
        tiers(layout, placement, config.storage, device),
        queue(open_queue(config, placement, tiers, decorate, notes)),
        store(config.storage, layout, tiers, *queue, scheduler),
        worker(config.threads, scheduler),
        loop(config, model, layout, placement, tiers, store, *queue, device, scheduler, worker),
        activations(placement, tiers, store, device, scheduler, activations_held_max(model)),
        state(layout, placement, tiers, store, device) {}

  static Placement placement_of(const Config& config, const ModelSpec& model, const Layout& layout,
                                const Device& device) {
    const OverlapPolicy policy = config.optimizer.overlap;
    Placement placement =
        plan_placement(layout, model, config.placement, budgets_of(config, device),
                       {.overlaps = policy != OverlapPolicy::kSerial,
                        .lanes = config.optimizer.lanes,
                        .activations = config.activations});
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
                         placement.activation_staging.count,
        .memory = placement.nvme_bytes() == 0 ? std::span<std::byte>() : tiers.transfer_memory(),
        .files = files};
    auto queue = open_io_queue(config.storage, pool, explanation);
    if (!explanation.empty() && placement.nvme_bytes() != 0) notes.push_back(explanation);
    return decorate ? decorate(std::move(queue)) : std::move(queue);
  }

  void require_idle(const char* call) {
    loop.throw_if_unusable();
    if (loop.is_active())
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}: a step or an inference is still active", call));
    if (!is_initialized)
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}: the state has no values yet; call initialize() first", call));
  }

  std::vector<std::string> notes;
  Config config;
  ModelSpec model;
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
};

Engine::Engine(const Config& config, const ModelSpec& model, Device& device,
               const QueueDecorator& decorate)
    : parts_(std::make_unique<Parts>(config, model, device, decorate)) {}

Engine::~Engine() {
  parts_->activations.abandon();
  parts_->loop.abandon();
  parts_->loop.settle();
  parts_->activations.settle();
}

void Engine::initialize(const InitialValues& values) {
  if (parts_->is_initialized)
    throw Error(ErrorCode::kInvalidArgument,
                "initialize: the state has its values already; make a new engine");
  parts_->state.initialize(values);
  parts_->loop.return_buffers();
  parts_->is_initialized = true;
}

Step Engine::begin_step(const StepOptions& options) {
  parts_->require_idle("begin_step");
  parts_->state.invalidate();
  const ActivationPlan& activations = parts_->loop.activations(options);
  parts_->loop.begin_step(options);
  Step step(parts_->loop, parts_->activations, parts_->layout);
  parts_->activations.begin(activations);
  return step;
}

Inference Engine::begin_inference() {
  parts_->require_idle("begin_inference");
  parts_->loop.begin_inference();
  Inference inference(parts_->loop, parts_->activations, parts_->layout);
  parts_->activations.begin(parts_->loop.inference_activations());
  return inference;
}

void Engine::drain() {
  parts_->loop.drain();
}

std::uint64_t Engine::applied_step() const {
  return parts_->loop.applied_step();
}

void Engine::read_state(TensorId tensor, StateKind kind, std::uint64_t first_element,
                        std::span<std::byte> target) {
  parts_->require_idle("read_state");
  parts_->loop.lend_buffers();
  parts_->state.read(tensor, kind, first_element, target);
  parts_->loop.return_buffers();
}

const Layout& Engine::layout() const {
  return parts_->layout;
}
const Placement& Engine::placement() const {
  return parts_->placement;
}
Traffic Engine::predicted_traffic(std::uint32_t micro_batches, MicroBatchOrder order) {
  return parts_->loop.predict_traffic(micro_batches, order);
}
std::span<const DirectFile> Engine::storage_files() const {
  return parts_->tiers.files();
}
const std::vector<std::string>& Engine::notes() const {
  return parts_->notes;
}

}  // namespace sluice
