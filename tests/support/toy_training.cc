#include "tests/support/toy_training.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <deque>
#include <optional>
#include <span>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <sluice/units.h>
#include "engine/engine_access.h"
#include "engine/plan/layout.h"
#include "tests/support/activation_relay.h"
#include "tests/support/evaluated_batches.h"
#include "tests/support/toy_computation.h"

namespace sluice::test {

ModelSpec toy_model(const std::vector<std::uint32_t>& frozen_units, std::uint32_t leases,
                    ToySize size) {
  const bool is_small = size == ToySize::kSmall;
  const auto tensor = [](std::string name, std::vector<std::uint64_t> shape, WeightDecay decay) {
    return TensorSpec{.name = std::move(name), .shape = std::move(shape), .weight_decay = decay};
  };
  ModelSpec model;
  model.units.push_back({"embedding",
                         {tensor("wte", {is_small ? 37u : 97u, 130}, WeightDecay::kApply),
                          tensor("wpe", {31, 130}, WeightDecay::kApply)}});
  for (int layer = 0; layer < 4; ++layer) {
    const std::string name = "h." + std::to_string(layer);
    const auto width = static_cast<std::uint64_t>((is_small ? 22 : 90) + 17 * layer);
    model.units.push_back({name,
                           {tensor(name + ".ln", {width}, WeightDecay::kNone),
                            tensor(name + ".fc", {width, 211}, WeightDecay::kApply),
                            tensor(name + ".bias", {211}, WeightDecay::kNone)}});
  }
  model.units.push_back({"scale", {tensor("scale", {1}, WeightDecay::kNone)}});
  // The embedding serves as the head too, as with tied weights.
  for (std::uint32_t unit = 0; unit < 6; ++unit) model.forward_order.push_back(UnitId{unit});
  model.forward_order.push_back(UnitId{0});
  for (const std::uint32_t unit : frozen_units) model.units[unit].is_frozen = true;
  model.concurrent_leases = leases;
  return model;
}

std::uint64_t digest_of(const std::byte* parameters, std::uint64_t size_bytes,
                        std::uint64_t digest) {
  return XXH3_64bits_withSeed(parameters, size_bytes, digest);
}

std::vector<std::uint64_t> toy_boundary_bytes() {
  return {5000, 100, 12'000, 4096, 1, 9000};
}

ModelSpec toy_model_of(const ToyOptions& options) {
  ModelSpec model = toy_model(options.frozen_units, options.leases, options.size);
  for (std::uint32_t expert = 0; expert < options.experts; ++expert) {
    const std::string name = "expert." + std::to_string(expert);
    model.units.push_back(
        {.name = name,
         .tensors = {{.name = name + ".w", .shape = {expert % 3 == 0 ? 95u : 30u + expert, 97}},
                     {.name = name + ".bias", .shape = {97}, .weight_decay = WeightDecay::kNone}},
         .is_announced = true});
  }
  if (options.has_boundaries) model.boundary_bytes = toy_boundary_bytes();
  return model;
}

InitialValues toy_values() {
  return [](const TensorPlace& tensor, std::uint64_t first, std::span<float> values) {
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = initial_value(tensor.name, first + i);
  };
}

Config config_of_environment() {
  Config config;
  const char* const unified = std::getenv("SLUICE_TEST_UNIFIED");
  if (unified != nullptr && std::string_view(unified) == "off")
    config.memory.unified = UnifiedMemory::kOff;
  const char* const guard = std::getenv("SLUICE_TEST_GUARD");
  if (guard != nullptr && std::string_view(guard) == "on") config.memory.guard = GuardMode::kOn;
  return config;
}

Config toy_config(const std::string& path) {
  Config config = config_of_environment();
  config.storage.paths = {path};
  config.storage.block_elements = 4096;
  config.memory.host_bytes = 64_MiB;
  config.threads = 2;
  config.optimizer.adam = {.beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1};
  return config;
}

StateBytes read_state(Engine& engine) {
  StateBytes state;
  for (const TensorPlace& tensor : engine.tensors()) {
    for (const StateKind kind :
         {StateKind::kParameter, StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq}) {
      const std::uint64_t element_bytes =
          kind == StateKind::kParameter ? layout_of(engine).format().parameter_bytes() : 4;
      const std::size_t begin = state.size();
      state.resize(begin + tensor.element_count * element_bytes);
      const bool is_moment = kind == StateKind::kExpAvg || kind == StateKind::kExpAvgSq;
      if (is_moment && layout_of(engine).unit(tensor.unit).is_frozen) continue;  // zeros
      engine.read_state(tensor.id, kind, 0, std::span(state).subspan(begin));
    }
  }
  return state;
}

namespace {

// Goes through uses on an engine's device: looks at the parameters of each, at the beginning and at
// the end of its lease, and computes gradients. Uses take turns on the streams.
class Walker {
 public:
  // `sights` and `streams` must outlive the work on the streams. Without sights it looks at
  // nothing. Without `activations` the application keeps its activations.
  Walker(const Engine& engine, HostDevice& device, const Config& config, std::uint32_t leases,
         std::span<const Stream> streams, std::deque<ToySight>* sights,
         ActivationRelay* activations)
      : layout_(layout_of(engine)),
        device_(device),
        config_(config),
        leases_(leases),
        streams_(streams),
        sights_(sights),
        activations_(activations) {}

  void train(Step& step, const ToyUses& uses, const ToyOptions& options = {}) {
    std::array<std::size_t, 2> announced{};  // uses before it have been; by UnitPlace::is_local
    for (const ToyUse& use : uses) {
      const auto at = static_cast<std::size_t>(&use - uses.data());
      std::size_t& end = announced[layout_.unit(use.unit).is_local ? 1 : 0];
      if (at >= end && layout_.unit(use.unit).is_announced) end = announce(step, uses, at, options);
      add(use.unit, use.pass, step.number() - 1,
          [&](const Stream& stream) { return step.acquire(use.unit, use.pass, stream); });
      pass_on(step, activation_use_of(use));
      const bool computes = !options.computes || !layout_.unit(use.unit).is_announced ||
                            options.computes(options.rank, use);
      if (use.pass == Pass::kBackward && !layout_.unit(use.unit).is_frozen && computes)
        compute(step.number(), use.number);
      if (!computes) let_go_of(held_.size() - 1);  // it has nothing to do with the unit
      let_go();
    }
    while (!held_.empty()) let_go_of(held_.size() - 1);
  }

  void evaluate(Inference& inference, const ModelSpec& model, std::uint64_t version) {
    for (std::uint32_t position = 0; position < model.forward_order.size(); ++position) {
      const UnitId unit = model.forward_order[position];
      add(unit, Pass::kInference, version,
          [&](const Stream& stream) { return inference.acquire(unit, stream); });
      pass_on(inference, {.position = position, .pass = Pass::kInference});
      let_go();
    }
    while (!held_.empty()) let_go_of(held_.size() - 1);
  }

 private:
  struct Held {
    std::uint64_t number = 0;
    Lease lease;
    StreamId stream{};
    ToySight* sight = nullptr;
  };

  // Announces uses from `begin` on: those that follow one another or, ahead, all of the pass; one
  // call per unit's use, and only local units or only others. Returns the end of the uses that have
  // been announced.
  std::size_t announce(Step& step, const ToyUses& uses, std::size_t begin,
                       const ToyOptions& options) const {
    const Pass pass = uses[begin].pass;
    std::vector<UnitId> expected, own;
    std::size_t end = begin;
    for (; end < uses.size() && uses[end].pass == pass; ++end) {
      const UnitId unit = uses[end].unit;
      const bool is_local = layout_.unit(unit).is_local;
      if (!layout_.unit(unit).is_announced || is_local != layout_.unit(uses[begin].unit).is_local) {
        if (options.announces_ahead) continue;
        break;
      }
      if (std::ranges::count(expected, unit) != 0) break;
      expected.push_back(unit);
      if (!options.computes || options.computes(options.rank, uses[end])) own.push_back(unit);
    }
    if (step.announce(own, pass) != expected)
      throw std::logic_error("announce() returns other units than the step uses");
    return end;
  }

  template <class Acquire>
  void add(UnitId unit, Pass pass, std::uint64_t version, const Acquire& acquire) {
    const Stream& stream = streams_[turn_++ % streams_.size()];
    held_.push_back({.number = turn_, .lease = acquire(stream), .stream = stream.id()});
    if (sights_ == nullptr) return;
    held_.back().sight = &sights_->emplace_back(ToySight{version, unit, pass});
    look(held_.back(), &ToySight::digest);
  }

  template <class Walk>
  void pass_on(Walk& walk, const ActivationRelay::Use& use) {
    if (activations_ != nullptr)
      activations_->run_use(walk, use, streams_[turn_ % streams_.size()]);
  }

  // Mostly as many stay as may, and now and then none. They go in any order.
  void let_go() {
    const std::size_t kept = turn_ % 5 == 4 ? 0 : leases_ - 1;
    while (!held_.empty() && held_.front().number + leases_ <= turn_ + 1) let_go_of(0);
    while (held_.size() > kept) let_go_of(mix(turn_ + held_.size()) % held_.size());
  }

  void let_go_of(std::size_t index) {
    const auto gone = held_.begin() + static_cast<std::ptrdiff_t>(index);
    if (sights_ != nullptr) look(*gone, &ToySight::digest_at_end);
    held_.erase(gone);
  }

  void look(const Held& held, std::uint64_t ToySight::*digest) {
    const auto tensors = layout_.tensors_of(held.lease.unit());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      device_.launch(held.stream,
                     [to = &(held.sight->*digest), parameters = held.lease.parameter(i),
                      bytes = tensors[i].element_count * layout_.format().parameter_bytes()] {
                       *to = digest_of(parameters, bytes, *to);
                     });
    }
  }

  void compute(std::uint64_t step, std::uint64_t use) {
    const Held& held = held_.back();
    const auto tensors = layout_.tensors_of(held.lease.unit());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      device_.launch(held.stream, [&config = config_, parameters = held.lease.parameter(i),
                                   gradients = held.lease.gradient(i),
                                   count = tensors[i].element_count, step, use, i] {
        fill_gradient(config, parameters, gradients, count, step, use, i);
      });
    }
  }

  const Layout& layout_;
  HostDevice& device_;
  const Config& config_;
  const std::uint32_t leases_;
  const std::span<const Stream> streams_;
  std::deque<ToySight>* sights_;
  ActivationRelay* activations_;
  std::uint64_t turn_ = 0;
  std::deque<Held> held_;
};

}  // namespace

void walk_step(Step& step, const ModelSpec& model, const Engine& engine, HostDevice& device,
               const Stream& stream, const Config& config, std::uint32_t micro_batches,
               MicroBatchOrder order) {
  walk_step(step, planned_uses(validated(model), micro_batches, order), engine, device, stream,
            config);
}

void walk_step(Step& step, const ToyUses& uses, const Engine& engine, HostDevice& device,
               const Stream& stream, const Config& config) {
  Walker(engine, device, config, /*leases=*/1, std::span(&stream, 1), nullptr, nullptr)
      .train(step, uses);
}

std::string text_behind(std::uint64_t step) {
  return step == 0 ? "" : fmt::format("behind step {}", step);
}

// From its last commit, with what this program has said of it.
void open_toy(Engine& engine) {
  const OpenedState opened = engine.open_or_create(toy_values());
  const std::string expected = text_behind(opened.step);
  if (opened.application != expected)
    throw std::logic_error(fmt::format("the commit of step {} has \"{}\" of the application",
                                       opened.step, opened.application));
}

ToyResult run_toy(Engine& engine, const ModelSpec& model, HostDevice& device, const Config& config,
                  const ToyOptions& options) {
  ToyResult result;
  if (options.source != nullptr) {
    const bool is_durable = !config.storage.state.name.empty();
    engine.restore(*options.source, is_durable ? text_behind(options.source->position().step) : "");
  } else if (!config.storage.state.name.empty()) {
    open_toy(engine);
  } else {
    engine.initialize(toy_values());
  }
  std::deque<ToySight> sights;
  ActivationRelay activations(device, model.boundary_bytes, options.rank);
  const bool has_activations = config.activations.home != ActivationHome::kKeep;
  std::vector<Stream> streams;  // last: their work uses all of the above
  for (std::uint32_t i = 0; i < options.streams; ++i) streams.emplace_back(device, "compute");
  const auto walker = [&] {
    activations.begin_walk();
    return Walker(engine, device, config, model.concurrent_leases, streams, &sights,
                  has_activations ? &activations : nullptr);
  };
  for (std::uint32_t i = 0; i < options.steps; ++i) {
    Step step = engine.begin_step({.learning_rate = options.learning_rate,
                                   .micro_batches = options.micro_batches,
                                   .order = options.order});
    const std::uint64_t number = step.number();
    walker().train(step, uses_of(model, number, options), options);
    FinishOptions finish;
    if (!config.storage.state.name.empty()) finish.application = text_behind(number);
    result.reports.push_back(step.finish(finish));
    if (options.after_step) options.after_step(engine, number);
    if (!options.evaluate) continue;
    // The smallest windows for several leases do not hold the last unit beside the first, with
    // which the next batch begins.
    std::optional<Inference> inference;
    for (std::uint32_t batch = 0; batch < kEvaluatedBatches; ++batch) {
      if (batch == 0 || model.concurrent_leases > 1) {
        inference.reset();
        inference.emplace(engine.begin_inference());
      }
      walker().evaluate(*inference, validated(model), number);
    }
  }
  engine.drain();
  result.predicted = engine.predicted_traffic(options.micro_batches, options.order);
  result.state = read_state(engine);
  for (const Stream& stream : streams) device.synchronize(stream.id());
  result.sights.assign(sights.begin(), sights.end());
  result.activations_seen = activations.seen();
  result.activations_wrong = activations.wrong();
  return result;
}

ToyResult run_toy(const Config& config, const ToyOptions& options) {
  const auto device = make_host_device({.memory_bytes = config.memory.device_bytes.value_or(64_MiB),
                                        .has_own_memory = options.has_own_memory});
  const ModelSpec model = toy_model_of(options);
  Engine engine(config, model, *device);
  return run_toy(engine, model, *device, config, options);
}

}  // namespace sluice::test
