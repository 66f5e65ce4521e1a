#include <sluice/detached_optimizer.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
#include "base/float_environment.h"
#include "base/moment_rounding.h"
#include "base/topology.h"
#include "cpu_optim/optimizer_options.h"
#include "engine/config/element_limit.h"
#include "engine/detached/detached_flow.h"
#include "engine/detached/detached_over_queue.h"
#include "engine/detached/detached_staging.h"
#include "engine/detached/detached_work.h"
#include "engine/plan/host_memory.h"

namespace sluice {
namespace {

[[noreturn]] void refuse_call(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

void check_tensors(std::span<const DetachedTensor> tensors, bool has_device) {
  if (tensors.empty()) refuse_call("detached optimizer: there are no tensors");
  std::uint64_t elements = 0;
  for (const DetachedTensor& tensor : tensors) {
    if (tensor.name.empty()) refuse_call("detached optimizer: a tensor has no name");
    if (tensor.element_count > kElementsMax - elements)
      refuse_call(
          fmt::format("detached optimizer: with tensor \"{}\" of {} elements, there are more "
                      "than {}",
                      tensor.name, tensor.element_count, kElementsMax));
    elements += tensor.element_count;
    if (tensor.is_on_device && !has_device)
      refuse_call(
          fmt::format("detached optimizer: tensor \"{}\" is on a device, but no device is "
                      "given",
                      tensor.name));
  }
}

Config checked(const Config& config, std::span<const DetachedTensor> tensors, bool has_device) {
  check_tensors(tensors, has_device);
  if (!config.storage.state.name.empty())
    throw Error(ErrorCode::kConfig,
                fmt::format("storage.state.name is \"{}\", but an optimizer that keeps neither "
                            "parameters nor gradients has no durable store; leave it out, and save "
                            "what the program needs to continue",
                            config.storage.state.name));
  validate(config);
  return config;
}

// The plan under the budget that `config` names, or that is free. Fails where too little is free.
DetachedPlan plan_here(const Config& config, std::span<const DetachedTensor> tensors,
                       std::vector<std::string>& notes) {
  HostMemory host = process_memory(false);
  DetachedPlan plan = plan_detached(config, tensors, *with_budgets(config.memory, host).host_bytes);
  host.host_pool_bytes = plan.host_bytes();
  if (std::string note = settle_shortage(shortage_of(host), config.memory.check); !note.empty())
    notes.push_back(std::move(note));
  return plan;
}

}  // namespace

struct DetachedOptimizer::Parts {
  Parts(const Config& given, std::vector<DetachedTensor> given_tensors, Device* given_device,
        const QueueDecorator& decorate)
      : has_device(given_device != nullptr),
        config(checked(given, given_tensors, has_device)),
        tensors(std::move(given_tensors)),
        plan(plan_here(config, tensors, notes)),
        uncomputed(tensors.size()),
        is_non_finite(tensors.size()),
        arena(granted_threads(config.threads)),
        worker(1, scheduler),
        staging(plan.staging_slots == 0 ? std::optional<DetachedStaging>()
                                        : std::optional<DetachedStaging>(std::in_place, plan,
                                                                         *given_device, scheduler)),
        flow(config.storage,
             {.plan = plan,
              .tensors = tensors,
              .scheduler = scheduler,
              .worker = worker,
              .staging = staging ? &*staging : nullptr},
             decorate) {
    scheduler.settle_with([this] { return flow.settle(); });
  }
  ~Parts() { scheduler.settle_with({}); }

  const DetachedTensor& tensor(const char* call, std::uint32_t id) const {
    if (id >= tensors.size())
      refuse_call(
          fmt::format("{}: tensor {} does not exist; there are {}", call, id, tensors.size()));
    return tensors[id];
  }
  UpdateCoefficients check(const DetachedUpdate& update) const;
  void check_range(const char* call, std::uint32_t id, StateKind kind, std::uint64_t first,
                   std::uint64_t count) const;
  DeviceValues values_of(const DetachedUpdate& update, const DetachedBlock& block) const;
  void begin(std::span<const DetachedUpdate> updates, std::optional<StreamId> stream);
  void add_update(const DetachedUpdate& update, const UpdateCoefficients& coefficients,
                  std::uint32_t block);
  // As Scheduler::await(); after a failure, no work on the application's memory continues.
  void await(const std::function<bool()>& ready) {
    try {
      scheduler.await(ready);
    } catch (...) {
      scheduler.await_settled([this] { return !flow.is_working(); });
      throw;
    }
  }
  void note_non_finite(std::uint32_t tensor);
  template <typename Element>
  void access(DetachedJob::Kind kind, StateKind what, std::uint32_t id, std::uint64_t first,
              std::span<Element> values);

  const bool has_device;
  const Config config;
  const std::vector<DetachedTensor> tensors;
  std::vector<std::string> notes;  // scheduler's thread, after construction
  const DetachedPlan plan;

  // Scheduler's thread only.
  std::vector<std::uint32_t> uncomputed;  // jobs of each tensor's updates
  std::uint32_t pending = 0;              // tensors that have any
  DetachedReport counts;
  std::vector<std::uint8_t> is_non_finite;  // by tensor: 1 = a note has named it

  WorkerArena arena;
  Scheduler scheduler;
  Worker worker;
  std::optional<DetachedStaging> staging;  // empty where no tensor on the device has elements
  DetachedFlow flow;
};

void DetachedOptimizer::Parts::note_non_finite(std::uint32_t tensor) {
  if (counts.non_finite_blocks++ == 0) counts.non_finite_tensor = tensors[tensor].name;
  if (std::exchange(is_non_finite[tensor], 1) != 0) return;
  notes.push_back(
      fmt::format("an update has left \"{}\" with an infinity or a NaN", tensors[tensor].name));
}

UpdateCoefficients DetachedOptimizer::Parts::check(const DetachedUpdate& update) const {
  const DetachedTensor& found = tensor("begin", update.tensor);
  if (found.element_count != 0 && (update.parameter == nullptr || update.gradient == nullptr))
    refuse_call(fmt::format("begin: tensor \"{}\" has no {}", found.name,
                            update.parameter == nullptr ? "parameter" : "gradient"));
  if (update.gradient_dtype > DType::kFp16)
    refuse_call(fmt::format("begin: tensor \"{}\" has a gradient of DType {}, which does not exist",
                            found.name, static_cast<int>(update.gradient_dtype)));
  try {
    const OptimizerOptions options{
        .kind = config.optimizer.kind, .adam = update.adam, .momentum = update.momentum};
    validate(options);
    const auto scale = static_cast<float>(update.gradient_scale);
    if (scale == 0 && update.gradient_scale != 0)
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("optimizer: the gradient's scale is {}, which is 0 in fp32",
                              update.gradient_scale));
    return coefficients_of(options, update.learning_rate, update.step, scale);
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("begin: tensor \"{}\": {}", found.name, error.what()));
  }
}

void DetachedOptimizer::Parts::check_range(const char* call, std::uint32_t id, StateKind kind,
                                           std::uint64_t first, std::uint64_t count) const {
  const DetachedTensor& found = tensor(call, id);
  if (kind > StateKind::kExpAvgSq)
    refuse_call(fmt::format("{}: StateKind {} does not exist", call, static_cast<int>(kind)));
  const bool is_of_master = kind == StateKind::kMaster || kind == StateKind::kParameter;
  if (is_of_master && found.parameter == DType::kFp32)
    refuse_call(
        fmt::format("{}: tensor \"{}\" is fp32, so it is its own master and nothing of it is "
                    "kept",
                    call, found.name));
  if (first > found.element_count || count > found.element_count - first)
    refuse_call(fmt::format("{}: elements [{}, +{}) of tensor \"{}\", which has {}", call, first,
                            count, found.name, found.element_count));
}

// The memory of `block` in the application's arrays.
DeviceValues DetachedOptimizer::Parts::values_of(const DetachedUpdate& update,
                                                 const DetachedBlock& block) const {
  const std::uint64_t parameter_bytes = size_of(tensors[update.tensor].parameter);
  const std::uint64_t gradient_bytes = size_of(update.gradient_dtype);
  return {.parameter =
              static_cast<std::byte*>(update.parameter) + block.first_element * parameter_bytes,
          .gradient =
              static_cast<const std::byte*>(update.gradient) + block.first_element * gradient_bytes,
          .parameter_bytes = block.element_count * parameter_bytes,
          .gradient_bytes = block.element_count * gradient_bytes};
}

void DetachedOptimizer::Parts::add_update(const DetachedUpdate& update,
                                          const UpdateCoefficients& coefficients,
                                          std::uint32_t block) {
  struct Job {
    DeviceValues values;  // on the host, if the tensor is there
    DType gradient_dtype;
    std::uint64_t rounding_key;
    UpdateCoefficients coefficients;
    BlockOutcome outcome;
    bool was_fresh = false;
  };
  const bool is_remote = tensors[update.tensor].is_on_device;
  auto job = std::make_shared<Job>(
      Job{.values = values_of(update, plan.blocks[block]),
          .gradient_dtype = update.gradient_dtype,
          .rounding_key = rounding_key_of_step(config.optimizer.rounding_seed, update.step),
          .coefficients = coefficients,
          .outcome = {}});
  if (uncomputed[update.tensor]++ == 0) ++pending;
  flow.add({.kind = DetachedJob::Kind::kUpdate,
            .block = block,
            .work =
                [this, job, block, is_remote](const DetachedJob::Ground& ground) {
                  job->was_fresh = ground.is_fresh;
                  const BlockValues values{
                      .parameter =
                          is_remote ? staging->parameter(ground.place) : job->values.parameter,
                      .gradient =
                          is_remote ? staging->gradient(ground.place, block) : job->values.gradient,
                      .gradient_dtype = job->gradient_dtype,
                      .rounding_key = job->rounding_key,
                      .parameter_is_known = is_remote && !staging->has_parameter(ground.place)};
                  if (ground.is_fresh) make_fresh(plan.blocks[block], ground.record);
                  job->outcome = update_detached(plan.blocks[block], values, job->coefficients,
                                                 ground.record, arena);
                },
            .worked =
                [this, job, block] {
                  const DetachedBlock& done = plan.blocks[block];
                  counts.updated_elements += done.element_count;
                  if (!job->was_fresh) counts.adopted_elements += job->outcome.adopted_elements;
                  if (job->outcome.state == NewState::kNonFinite) note_non_finite(done.tensor);
                  if (--uncomputed[done.tensor] == 0) --pending;
                },
            .remote = is_remote ? std::optional(job->values) : std::nullopt});
}

DetachedOptimizer::DetachedOptimizer(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

DetachedOptimizer::DetachedOptimizer(const Config& config, std::vector<DetachedTensor> tensors)
    : DetachedOptimizer(
          std::make_unique<Parts>(config, std::move(tensors), nullptr, QueueDecorator())) {}

DetachedOptimizer::DetachedOptimizer(const Config& config, std::vector<DetachedTensor> tensors,
                                     Device& device)
    : DetachedOptimizer(
          std::make_unique<Parts>(config, std::move(tensors), &device, QueueDecorator())) {}

DetachedOptimizer DetachedOverQueue::make(const Config& config, std::vector<DetachedTensor> tensors,
                                          const QueueDecorator& decorate, Device* device) {
  return DetachedOptimizer(
      std::make_unique<DetachedOptimizer::Parts>(config, std::move(tensors), device, decorate));
}

DetachedOptimizer::~DetachedOptimizer() = default;

void DetachedOptimizer::begin(std::span<const DetachedUpdate> updates) {
  for (const DetachedUpdate& update : updates)
    if (const DetachedTensor& tensor = parts_->tensor("begin", update.tensor); tensor.is_on_device)
      refuse_call(
          fmt::format("begin: tensor \"{}\" is on the device; give the stream whose work "
                      "makes its gradient",
                      tensor.name));
  parts_->begin(updates, std::nullopt);
}

void DetachedOptimizer::begin(std::span<const DetachedUpdate> updates, StreamId stream) {
  if (!parts_->has_device) refuse_call("begin: this optimizer was made without a device");
  parts_->begin(updates, stream);
}

void DetachedOptimizer::Parts::begin(std::span<const DetachedUpdate> updates,
                                     std::optional<StreamId> stream) {
  scheduler.throw_if_failed();
  const FloatEnvironment environment;
  std::vector<UpdateCoefficients> coefficients;
  for (const DetachedUpdate& update : updates) coefficients.push_back(check(update));
  if (stream && staging) staging->wait_for(*stream);
  scheduler.run([&] {
    for (std::size_t i = 0; i < updates.size(); ++i) {
      const std::uint32_t tensor = updates[i].tensor;
      for (std::uint32_t block = plan.first_block[tensor]; block < plan.first_block[tensor + 1];
           ++block)
        add_update(updates[i], coefficients[i], block);
    }
  });
}

void DetachedOptimizer::wait(std::uint32_t tensor) {
  (void)parts_->tensor("wait", tensor);
  parts_->await([&] { return parts_->uncomputed[tensor] == 0; });
}

void DetachedOptimizer::wait_parameters() {
  parts_->await([&] { return parts_->pending == 0; });
}

void DetachedOptimizer::wait_all() {
  parts_->await([&] { return parts_->flow.is_idle(); });
}

std::uint32_t DetachedOptimizer::pending_tensors() {
  std::uint32_t pending = 0;
  parts_->scheduler.run([&] { pending = parts_->pending; });
  return pending;
}

template <typename Element>
void DetachedOptimizer::Parts::access(DetachedJob::Kind kind, StateKind what, std::uint32_t id,
                                      std::uint64_t first, std::span<Element> values) {
  scheduler.throw_if_failed();
  std::uint32_t left = 0;
  scheduler.run([&] {
    for (std::uint32_t i = plan.first_block[id]; i < plan.first_block[id + 1]; ++i) {
      const DetachedBlock& block = plan.blocks[i];
      const std::uint64_t begin = std::max(first, block.first_element);
      const std::uint64_t end =
          std::min(first + values.size(), block.first_element + block.element_count);
      if (begin >= end) continue;
      const std::span<Element> piece = values.subspan(begin - first, end - begin);
      const std::uint64_t in_block = begin - block.first_element;
      ++left;
      flow.add({.kind = kind,
                .block = i,
                .work =
                    [&block, piece, in_block, what](const DetachedJob::Ground& ground) {
                      if (ground.is_fresh) make_fresh(block, ground.record);
                      if constexpr (std::is_const_v<Element>) {
                        write_detached(block, what, ground.record, in_block, piece);
                      } else {
                        read_detached(block, what, ground.record, in_block, piece);
                      }
                    },
                .worked = [&left] { --left; }});
    }
  });
  await([&] { return left == 0; });
}

void DetachedOptimizer::read(std::uint32_t tensor, StateKind kind, std::uint64_t first_element,
                             std::span<float> target) {
  parts_->check_range("read", tensor, kind, first_element, target.size());
  parts_->access(DetachedJob::Kind::kRead, kind, tensor, first_element, target);
}

void DetachedOptimizer::write(std::uint32_t tensor, StateKind kind, std::uint64_t first_element,
                              std::span<const float> source) {
  parts_->check_range("write", tensor, kind, first_element, source.size());
  const OptimizerKind optimizer = parts_->config.optimizer.kind;
  const bool is_kept = kind == StateKind::kMaster ||
                       (kind == StateKind::kExpAvg && keeps_exp_avg(optimizer)) ||
                       (kind == StateKind::kExpAvgSq && keeps_exp_avg_sq(optimizer));
  if (!is_kept)
    refuse_call(fmt::format("write: {} of tensor \"{}\" is not kept by {}", name_of(kind),
                            parts_->tensors[tensor].name, name_of(optimizer)));
  // An update never makes a negative square, and would take its root. Infinity and NaN come from
  // gradients, and updates let them pass, too.
  const auto wrong = std::ranges::find_if(source, [](float value) { return value < 0; });
  if (kind == StateKind::kExpAvgSq && wrong != source.end())
    refuse_call(
        fmt::format("write: the {} given for tensor \"{}\" at element {} is {}; it must be at "
                    "least 0; check the "
                    "source of the state",
                    name_of(kind), parts_->tensors[tensor].name,
                    first_element + static_cast<std::uint64_t>(wrong - source.begin()), *wrong));
  parts_->access(DetachedJob::Kind::kWrite, kind, tensor, first_element, source);
}

DetachedReport DetachedOptimizer::report() {
  DetachedReport report;
  parts_->scheduler.run([&] { report = parts_->counts; });
  const IoCounters counters = parts_->flow.counters();
  report.read_bytes = counters.read_bytes;
  report.write_bytes = counters.write_bytes;
  report.host_bytes = parts_->plan.host_bytes();
  report.storage_bytes = report.pass_read_bytes = parts_->plan.storage_bytes;
  return report;
}

std::vector<std::string> DetachedOptimizer::take_notes() {
  std::vector<std::string> notes;
  parts_->scheduler.run([&] { notes = std::exchange(parts_->notes, {}); });
  std::ranges::move(parts_->flow.take_notes(), std::back_inserter(notes));
  return notes;
}

}  // namespace sluice
