#include "engine/engine_parts.h"

#include <cstdlib>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
#include "base/float_environment.h"
#include "base/topology.h"
#include "base/trace/trace_ranges.h"
#include "engine/planner/run_plan.h"
#include "engine/ranks/host_cores.h"
#include "engine/ranks/local_units.h"
#include "engine/ranks/pool_check.h"
#include "engine/ranks/rank_clocks.h"
#include "engine/run/engine_trace.h"
#include "engine/run/run_description.h"
#include "engine/store/durable_identity.h"
#include "engine/store/storage_files.h"
#include "engine/store/storage_queue.h"
#include "gpu/ranks/launcher_environment.h"
#include "io/direct_file.h"

namespace sluice {
namespace {

constexpr std::string_view kStateSource = "the source of the state";
// Planes that a commit may have in transit, beside its files.
constexpr std::uint32_t kCommitTransfers = 8;

Config checked(Config config) {
  validate(config);
  config.threads = granted_threads(config.threads);
  if (config.precision.scale_moves()) config.optimizer.non_finite = NonFinitePolicy::kSkip;
  return config;
}

// Ranks agree on the least, because windows and homes have to be equal. The engine has already
// taken some of the device for votes.
std::uint64_t device_bytes_of(const Config& config, const Device& device, Ranks& ranks) {
  const std::uint64_t own = config.memory.device_bytes.value_or(
      device.capacity_bytes() - device.allocated_bytes() + ranks.device_bytes());
  RankRange range(own);
  ranks.all_reduce({}, std::span(&range, 1), "device memory");
  return range.least;
}

Placement placement_of(Config config, const ModelSpec& model, const Layout& layout,
                       const Device& device, Ranks& ranks, std::vector<std::string>& notes) {
  check_guard(config, device);
  const HostMemory host = host_of(device, ranks);
  config.memory.device_bytes = device_bytes_of(config, device, ranks);
  config.memory = with_budgets(config.memory, host);
  Placement placement =
      plan_run(config, model, layout,
               {.ranks = ranks.count(),
                .device_is_host = !device.has_own_memory(),
                .host_memory_bytes = topology().memory_bytes,
                .free_bytes = [sharing = host.ranks](
                                  const std::string& path) { return free_bytes(path) / sharing; }})
          .placement;
  ranks.reserve(config.sharding, layout);
  SLUICE_CHECK(ranks.device_bytes() == placement.rank_buffer_bytes,
               "the plan counts what ranks take");
  notes = check_pools(config.memory.check, placement, host, device, ranks);
  return placement;
}

std::unique_ptr<IoQueue> open_queue(const Config& config, const Placement& placement,
                                    const Tiers& tiers, const QueueDecorator& decorate,
                                    std::vector<std::string>& notes) {
  std::string explanation;
  // One per drive. A store's files may lie on fewer paths than there are.
  std::vector<int> files;
  if (!tiers.files().empty()) {
    files.assign(config.storage.paths.size(), tiers.file(0).descriptor());
    for (std::size_t file = tiers.files().size(); file-- > 0;)
      files[tiers.drive(static_cast<std::uint32_t>(file))] =
          tiers.file(static_cast<std::uint32_t>(file)).descriptor();
  }
  const TransferPool pool{
      .transfers_max = placement.parameter_slots.count + placement.lanes.count +
                       placement.lane_gradients.count + placement.activation_staging.count +
                       placement.gradient_staging.count + 2 * placement.save_buffers.count +
                       (placement.durable_copies == 0
                            ? 0
                            : kCommitTransfers + static_cast<std::uint32_t>(files.size())),
      .memory = placement.nvme_bytes() == 0 ? std::span<std::byte>() : tiers.transfer_memory(),
      .files = files};
  if (std::string note = note_of_cached(tiers.files()); !note.empty())
    notes.push_back(std::move(note));
  auto queue = open_io_queue(config.storage, pool, explanation);
  if (!explanation.empty() && placement.nvme_bytes() != 0) notes.push_back(explanation);
  return decorate ? decorate(std::move(queue)) : std::move(queue);
}

// Each rank that is not bound may use every core of its host. All of them together cannot.
unsigned granted_to_rank() {
  try {
    const auto launch = find_launch(std::getenv);
    if (launch && launch->local_rank_count > 1)
      return own_share_of_cores(launch->rank_variable, launch->local_rank_count);
  } catch (const Error&) {
    // An application that connects its ranks itself may have variables that contradict each other.
  }
  return topology().granted_cores;
}

}  // namespace

std::unique_ptr<Engine::Parts> Engine::Parts::make(const Config& config, const ModelSpec& model,
                                                   Device& device, const QueueDecorator& decorate,
                                                   Collectives* collectives) {
  const FloatEnvironment environment;
  return std::make_unique<Parts>(config, model, device, decorate, collectives);
}

Engine::Parts::Parts(const Config& given_config, const ModelSpec& given_model, Device& device,
                     const QueueDecorator& decorate, Collectives* collectives)
    : config(checked(given_config)),
      model(validated(given_model)),
      ranks(config.sharding, collectives, device),
      layout(plan_layout(config, model, ranks.shard())),
      placement(placement_of(config, model, layout, device, ranks, notes)),
      durable(config.storage.state.name.empty()
                  ? std::optional<DurableStore>()
                  : std::optional<DurableStore>(std::in_place, config, model, layout, placement,
                                                ranks)),
      tiers(layout, placement, config.storage, device,
            durable ? durable->take_homes() : DurableHomes()),
      guard(make_lease_guard(config, layout, tiers, device)),
      queue(open_queue(config, placement, tiers, decorate, notes)),
      store(config.storage, layout, tiers, *queue, scheduler),
      worker(config.threads, scheduler),
      flow{config, model,     layout, placement, tiers,   store,    *queue,
           device, scheduler, worker, ranks,     counted, versions, guard.get()},
      loop(flow, durable ? &durable->start() : nullptr),
      activations(flow, loop.timeline()),
      state(layout, placement, tiers, store, device, scheduler) {
  link->loop = &loop;
  link->activations = &activations;
  link->layout = &layout;
  link->device = &device;
  if (std::vector<std::string> names; trace_ranges_are_on) {
    for (const UnitSpec& unit : model.units) names.push_back(unit.name);
    name_trace_units(names);
  }
  ranks.on_failure([this](const Error& error) { scheduler.fail(error); });
  ranks.require_agreement(describe_run(config, model, layout, placement,
                                       tiers.device_memory().size(), loop.scheduled_step()),
                          "the description of the run");
  ranks.use_memory(tiers.device_memory());
  for (std::string& note : ranks.notes()) notes.push_back(std::move(note));
  if (durable) {
    notes.insert(notes.end(), durable->notes().begin(), durable->notes().end());
    if (!durable->is_new()) store.restore(durable->record().planes);
  }
  if (trace_enabled())
    trace_section("engine", describe_engine(config, model, layout, placement, ranks.count(),
                                            granted_to_rank()));
  // Ranks that do not trace take part in it, too.
  if (ranks.are_several() && any_rank_traces(ranks)) trace_section("clock", describe_clock(ranks));
}

void Engine::Parts::read(TensorId id, StateKind kind, std::uint64_t first_element,
                         std::span<std::byte> target) {
  const auto read_own = [&] { state.read(id, kind, first_element, target); };
  const TensorPlace& tensor = layout.tensor(id);
  if (!ranks.shard_optimizer() || layout.unit(tensor.unit).is_local) return read_own();
  ranks.together(fmt::format("read_state of \"{}\"", tensor.name), read_own);
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

void Engine::Parts::require_idle(const char* call) {
  if (is_closed)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: the engine has been closed; make a new one", call));
  loop.throw_if_unusable();
  if (loop.is_active())
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: a step or an inference is still active; finish or destroy it first",
                    call));
  if (!is_initialized)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: the state has no values yet; call initialize() first", call));
}

void Engine::Parts::require_no_state(const char* call) const {
  if (is_initialized)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: the state has its values already; make a new engine", call));
}

bool Engine::Parts::is_shared(const std::string& tensor) const {
  const auto found = std::ranges::find(layout.tensors(), tensor, &TensorPlace::name);
  return found != layout.tensors().end() && !layout.unit(found->unit).is_local;
}

StateDescription Engine::Parts::description_of_all() {
  StateDescription own = describe_state(model, config.precision.parameters, config.optimizer.kind,
                                        config.optimizer.state);
  if (!ranks.are_several() || std::ranges::none_of(layout.units(), &UnitPlace::is_local))
    return own;
  return describe_all_ranks(own, layout, ranks);
}

void Engine::Parts::require_durable(const char* call) const {
  if (!durable)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: the state lies in scratch files; name a durable store with "
                            "storage.state.name",
                            call));
}

void Engine::Parts::fill(StateSource& source, const std::string& application, const char* call) {
  require_no_state(call);
  loop.set_application(call, application);
  const StateDescription description = description_of_all();
  ranks.together(kStateSource, [&] {
    if (durable) durable->require_other_step(source.position().step);
    source.prepare(description);
  });
  const StatePosition position = source.position();
  const LossScaleState scale = position.loss_scale.value_or(LossScaleState{});
  std::string updates;
  for (const auto& [tensor, count] : position.tensor_updates)
    if (is_shared(tensor)) updates += fmt::format("; {} updates of {}", count, tensor);
  ranks.require_agreement(fmt::format("step {}, loss scale {} {} {} {}{}", position.step,
                                      position.loss_scale.has_value(), scale.scale,
                                      scale.hysteresis_left, scale.good_steps, updates),
                          "the position of the training");
  ranks.together_for_long(kStateSource, [&] {
    versions.restore(position);
    state.restore(source, versions);
  });
  loop.restore(position);
  lend_state();
  commit_first();
  is_initialized = true;
}

void Engine::Parts::replace_values(std::span<const TensorId> tensors, const InitialValues& values) {
  const auto refuse = [](ErrorCode code, const std::string& why) {
    throw Error(code, "replace_values: " + why);
  };
  if (durable)
    refuse(
        ErrorCode::kUnsupported,
        fmt::format("the store \"{}\" holds the state of its last commit; give the values to a new "
                    "store, under another storage.state.name",
                    durable->name()));
  std::vector<bool> is_wanted(layout.tensors().size());
  std::string list;
  ranks.together(kStateSource, [&] {
    if (!values) refuse(ErrorCode::kInvalidArgument, "the function that gives the values is empty");
    for (const TensorId tensor : tensors) {
      if (index_of(tensor) >= is_wanted.size())
        refuse(ErrorCode::kInvalidArgument,
               fmt::format("tensor {} does not exist; the model has {}", index_of(tensor),
                           is_wanted.size()));
      is_wanted[index_of(tensor)] = true;
      list += fmt::format("{} ", index_of(tensor));
    }
  });
  ranks.require_agreement(list, "the list of tensors that get other values");
  const auto stop = [this](std::string_view why) {
    loop.return_buffers();
    // Each rank has some of the values, and copies of one tensor may differ from now on.
    if (ranks.are_several())
      scheduler.fail(
          Error(ErrorCode::kPoisoned,
                fmt::format("replace_values failed halfway, and the ranks' parameters may "
                            "differ; restore a checkpoint into a new engine: {}",
                            why)));
  };
  loop.lend_buffers();
  try {
    ranks.together(kStateSource, [&] { state.replace(is_wanted, values, versions); });
    if (ranks.shard_optimizer()) loop.share_residents();
  } catch (const std::exception& error) {
    stop(error.what());
    throw;
  } catch (...) {
    stop("the function that gives the values has thrown no exception of C++");
    throw;
  }
  loop.return_buffers();
}

// The commit is whole, also behind a restore() that has failed halfway: that has written to other
// copies, and has set homes, versions and the application's text.
void Engine::Parts::open_store() {
  const CommitRecord& record = durable->record();
  store.restore(record.planes);
  loop.set_application("open_or_create", loop.committed().application);
  StatePosition position{.step = record.step, .loss_scale = moving_scale(record)};
  for (const TensorPlace& tensor : layout.tensors()) {
    const BlockId block = layout.blocks_of(tensor.unit).front().id;
    position.tensor_updates[tensor.name] = store.version(block, Plane::kParameter);
  }
  ranks.together(kStateSource, [&] {
    versions.restore(position);
    state.open();
  });
  loop.restore(position);
  lend_state();
  is_initialized = true;
}

void Engine::Parts::lend_state() {
  state.lend_homes();
  if (ranks.shard_optimizer()) loop.share_residents();
  loop.return_buffers();
}

// A new store exists once this has ended; an old one then holds this state instead of its own.
void Engine::Parts::commit_first() {
  if (!durable) return;
  const bool is_new = durable->is_new();
  if (is_new) durable->name_data();
  loop.commit_first();
  if (is_new) durable->name_records();
}

}  // namespace sluice
