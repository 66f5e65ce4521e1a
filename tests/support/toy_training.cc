#include "tests/support/toy_training.h"

#include <fnmatch.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "base/units.h"
#include "tests/support/elements.h"

namespace sluice::test {
namespace {

std::uint64_t mix(std::uint64_t value) {  // SplitMix64's finalizer
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

float uniform(std::uint64_t key) {
  return static_cast<float>(static_cast<std::int64_t>(mix(key) >> 40) - (1 << 23)) * 0x1p-23f;
}

constexpr std::uint64_t kUsesOfRank = 1 << 20;  // tells the ranks' uses apart
// What "computation" gives for one element.
float toy_gradient(float parameter, std::uint64_t step, std::uint64_t use, std::uint64_t tensor,
                   std::uint64_t index) {
  return 0.3f * parameter + uniform(step * 1000003 + use * 10007 + tensor * 101 + (index << 20));
}

void fill_gradient(const Config& config, const std::byte* parameters, std::byte* gradients,
                   std::uint64_t count, std::uint64_t step, std::uint64_t use,
                   std::uint64_t tensor) {
  for (std::uint64_t i = 0; i < count; ++i) {
    const float parameter = load(config.precision.parameters, parameters, i);
    save(config.precision.gradients, gradients, i, toy_gradient(parameter, step, use, tensor, i));
  }
}

float initial_value(const std::string& tensor, std::uint64_t index) {
  std::uint64_t key = 7;
  for (const char letter : tensor) key = mix(key + static_cast<unsigned char>(letter));
  return uniform(key + index);
}

// The uses of a step in `order`. A use keeps its number, its place in horizontal order.
ToyUses planned_uses(const ModelSpec& model, std::uint32_t micro_batches, MicroBatchOrder order) {
  const std::size_t forward = model.forward_order.size();
  const std::size_t backward = model.backward_order.size();
  ToyUses uses;
  const auto add_pass = [&](Pass pass, std::uint32_t first, std::uint32_t last) {
    const auto& units = pass == Pass::kForward ? model.forward_order : model.backward_order;
    for (std::size_t i = 0; i < units.size(); ++i) {
      for (std::uint32_t micro_batch = first; micro_batch < last; ++micro_batch)
        uses.push_back(
            {units[i], pass,
             micro_batch * (forward + backward) + (pass == Pass::kForward ? i : forward + i)});
    }
  };
  const std::uint32_t at_once = order == MicroBatchOrder::kVertical ? micro_batches : 1;
  for (std::uint32_t first = 0; first < micro_batches; first += at_once) {
    add_pass(Pass::kForward, first, first + at_once);
    add_pass(Pass::kBackward, first, first + at_once);
  }
  return uses;
}

ToyUses uses_of(const ModelSpec& model, std::uint64_t step, const ToyOptions& options) {
  ToyUses uses = planned_uses(validated(model), options.micro_batches, options.order);
  if (options.change) options.change(step, uses);
  for (ToyUse& use : uses) use.number += options.rank * kUsesOfRank;
  return uses;
}

}  // namespace

ModelSpec toy_model(const std::vector<std::uint32_t>& frozen_units) {
  const auto tensor = [](std::string name, std::vector<std::uint64_t> shape, WeightDecay decay) {
    return TensorSpec{.name = std::move(name), .shape = std::move(shape), .weight_decay = decay};
  };
  ModelSpec model;
  model.units.push_back({"embedding",
                         {tensor("wte", {97, 130}, WeightDecay::kApply),
                          tensor("wpe", {31, 130}, WeightDecay::kApply)}});
  for (int layer = 0; layer < 4; ++layer) {
    const std::string name = "h." + std::to_string(layer);
    const auto width = static_cast<std::uint64_t>(90 + 17 * layer);
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
  return model;
}

InitialValues toy_values() {
  return [](const TensorPlace& tensor, std::uint64_t first, std::span<float> values) {
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = initial_value(tensor.name, first + i);
  };
}

Config toy_config(const std::string& path) {
  Config config;
  config.storage.paths = {path};
  config.storage.block_elements = 4096;
  config.memory.host_bytes = 64_MiB;
  config.threads = 2;
  config.optimizer.adam = {.beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1};
  return config;
}

StateBytes read_state(Engine& engine) {
  StateBytes state;
  for (const TensorPlace& tensor : engine.layout().tensors()) {
    for (const StateKind kind :
         {StateKind::kParameter, StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq}) {
      const std::uint64_t element_bytes =
          kind == StateKind::kParameter ? engine.layout().format().parameter_bytes() : 4;
      const std::size_t begin = state.size();
      state.resize(begin + tensor.element_count * element_bytes);
      engine.read_state(tensor.id, kind, 0, std::span(state).subspan(begin));
    }
  }
  return state;
}

void walk_step(Step& step, const ModelSpec& model, const Engine& engine, HostDevice& device,
               const Stream& stream, const Config& config, std::uint32_t micro_batches,
               MicroBatchOrder order) {
  walk_step(step, planned_uses(validated(model), micro_batches, order), engine, device, stream,
            config);
}

void walk_step(Step& step, const ToyUses& uses, const Engine& engine, HostDevice& device,
               const Stream& stream, const Config& config) {
  for (const ToyUse& use : uses) {
    const Lease lease = step.acquire(use.unit, use.pass, stream);
    if (use.pass == Pass::kForward || engine.layout().unit(use.unit).is_frozen) continue;
    const auto tensors = engine.layout().tensors_of(use.unit);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      device.launch(stream.id(),
                    [&config, parameters = lease.parameter(i), gradients = lease.gradient(i),
                     count = tensors[i].element_count, number = step.number(), use = use.number,
                     i] { fill_gradient(config, parameters, gradients, count, number, use, i); });
    }
  }
}

ToyResult run_toy(Engine& engine, const ModelSpec& model, HostDevice& device, const Config& config,
                  const ToyOptions& options) {
  ToyResult result;
  engine.initialize(toy_values());
  const Stream stream(device, "compute");
  for (std::uint32_t i = 0; i < options.steps; ++i) {
    Step step = engine.begin_step({.learning_rate = options.learning_rate,
                                   .micro_batches = options.micro_batches,
                                   .order = options.order});
    walk_step(step, uses_of(model, step.number(), options), engine, device, stream, config);
    result.reports.push_back(step.finish());
    if (!options.evaluate) continue;
    Inference inference = engine.begin_inference();
    for (const UnitId unit : validated(model).forward_order) (void)inference.acquire(unit, stream);
  }
  engine.drain();
  result.predicted = engine.predicted_traffic(options.micro_batches, options.order);
  result.state = read_state(engine);
  return result;
}

ToyResult run_toy(const Config& config, const ToyOptions& options) {
  const auto device =
      make_host_device({.memory_bytes = config.memory.device_bytes.value_or(64_MiB),
                        .has_own_memory = options.has_own_memory});
  const ModelSpec model = toy_model(options.frozen_units);
  Engine engine(config, model, *device);
  return run_toy(engine, model, *device, config, options);
}

namespace {

// The job in plain arrays: what the engine must equal bit for bit.
class Oracle {
 public:
  Oracle(const Config& config, const ToyOptions& options)
      : config_(config), model_(validated(toy_model(options.frozen_units))) {
    for (const UnitSpec& spec : model_.units) {
      std::vector<Tensor>& tensors = units_.emplace_back();
      for (const TensorSpec& tensor : spec.tensors) {
        tensors.push_back(make_tensor(tensor));
        tensors.back().is_frozen = spec.is_frozen;
      }
    }
  }

  StepReport train_step(std::uint64_t step, const ToyOptions& options) {
    compute_gradients(step, options);
    // Tensors start at a leaf of the norm, so that leaf by tensor is leaf by unit.
    NormAccumulator norm;
    for_each_tensor([&](Tensor& tensor) {
      add_squared_norm_reference(config_.precision.gradients, tensor.gradients.data(),
                                 tensor.master.size(), norm);
    });
    StepReport report;
    report.step = step;
    const double count = static_cast<double>(options.micro_batches) * options.rank_count;
    report.gradient_norm = std::sqrt(norm.sum_of_squares()) / count;
    const double clip = config_.optimizer.clip_norm;
    if (clip > 0 && report.gradient_norm > clip) report.clip_factor = clip / report.gradient_norm;
    const auto scale = static_cast<float>(report.clip_factor / count);
    for_each_tensor([&](Tensor& tensor) { update(tensor, step, options.learning_rate, scale); });
    return report;
  }

  StateBytes state() {
    StateBytes state;
    const auto append = [&](const void* data, std::size_t size_bytes) {
      const auto* bytes = static_cast<const std::byte*>(data);
      state.insert(state.end(), bytes, bytes + size_bytes);
    };
    for_each_tensor([&](Tensor& tensor) {
      if (tensor.is_frozen) {  // what there is of a master are the parameters
        for (std::size_t i = 0; i < tensor.master.size(); ++i)
          tensor.master[i] = load(config_.precision.parameters, tensor.parameters.data(), i);
      }
      append(tensor.parameters.data(), tensor.parameters.size());
      append(tensor.master.data(), tensor.master.size() * sizeof(float));
      append(tensor.exp_avg.data(), tensor.exp_avg.size() * sizeof(float));
      append(tensor.exp_avg_sq.data(), tensor.exp_avg_sq.size() * sizeof(float));
    });
    return state;
  }

 private:
  struct Tensor {
    std::vector<float> master, exp_avg, exp_avg_sq;
    std::vector<std::byte> parameters, gradients, fresh;
    WeightDecay decay{};
    std::string name;
    bool is_frozen = false;
  };

  using Parts = std::vector<std::vector<std::byte>>;

  template <typename Body>
  void for_each_tensor(const Body& body) {
    for (auto& unit : units_) {
      for (Tensor& tensor : unit) body(tensor);
    }
  }

  Tensor make_tensor(const TensorSpec& spec) const {
    const std::size_t count = spec.element_count();
    Tensor tensor;
    tensor.master.resize(count);
    tensor.exp_avg.resize(count);
    tensor.exp_avg_sq.resize(count);
    tensor.parameters.resize(count * size_of(config_.precision.parameters));
    tensor.gradients.resize(count * size_of(config_.precision.gradients));
    tensor.fresh.resize(tensor.gradients.size());
    tensor.decay = spec.weight_decay;
    tensor.name = spec.name;
    for (std::size_t i = 0; i < count; ++i) tensor.master[i] = initial_value(spec.name, i);
    publish(tensor);
    return tensor;
  }

  // The compute parameters of the masters.
  void publish(Tensor& tensor) const {
    const DType dtype = config_.precision.parameters;
    for (std::size_t i = 0; i < tensor.master.size(); ++i) {
      if (dtype == DType::kBf16) {  // half away from zero, not to even
        reinterpret_cast<std::uint16_t*>(tensor.parameters.data())[i] =
            split_master(tensor.master[i]).high;
      } else {
        save(dtype, tensor.parameters.data(), i, tensor.master[i]);
      }
    }
  }

  void compute_gradients(std::uint64_t step, const ToyOptions& options) {
    // Ranks that are added at once, `passes` times before the results are added.
    const std::uint32_t passes = options.reduces_each ? 1 : options.rank_count;
    const std::uint32_t ranks = options.rank_count / passes;
    std::map<const Tensor*, Parts> sums;  // by pass
    for (std::uint32_t pass = 0; pass < passes; ++pass) {
      std::vector<bool> seen(units_.size(), false);
      for_each_tensor([](Tensor& tensor) { std::ranges::fill(tensor.gradients, std::byte{0}); });
      for (const ToyUse& use : uses_of(model_, step, options)) {
        const std::uint32_t unit = index_of(use.unit);
        if (use.pass == Pass::kForward || model_.units[unit].is_frozen) continue;
        add_gradients(units_[unit], seen[unit], step, use.number + pass * kUsesOfRank, ranks);
        seen[unit] = true;
      }
      for_each_tensor([&](Tensor& tensor) { sums[&tensor].push_back(tensor.gradients); });
    }
    for_each_tensor([&](Tensor& t) { t.gradients = sum_over_ranks(sums[&t], t.master.size()); });
  }

  // Rank order in each group, then the groups in order, fp32, one rounding.
  std::vector<std::byte> sum_over_ranks(const Parts& parts, std::size_t count) const {
    const DType type = config_.precision.gradients;
    const std::size_t given = config_.sharding.group_ranks;
    const std::size_t group = given == 0 ? parts.size() : given;
    std::vector<std::byte> result = parts.front();
    for (std::size_t i = 0; i < count && parts.size() > 1; ++i) {
      float sum = 0;
      for (std::size_t first = 0; first < parts.size(); first += group) {
        float of_group = load(type, parts[first].data(), i);
        for (std::size_t rank = first + 1; rank < first + group; ++rank)
          of_group += load(type, parts[rank].data(), i);
        sum = first == 0 ? of_group : sum + of_group;
      }
      save(type, result.data(), i, sum);
    }
    return result;
  }

  void add_gradients(std::vector<Tensor>& unit, bool has_some, std::uint64_t step,
                     std::uint64_t use, std::uint32_t ranks) const {
    for (std::size_t i = 0; i < unit.size(); ++i) {
      Tensor& tensor = unit[i];
      const std::size_t count = tensor.master.size();
      Parts parts;
      for (std::uint32_t rank = 0; rank < ranks; ++rank) {
        fill_gradient(config_, tensor.parameters.data(), tensor.fresh.data(), count, step,
                      use + rank * kUsesOfRank, i);
        parts.push_back(tensor.fresh);
      }
      tensor.fresh = sum_over_ranks(parts, count);
      if (has_some) {
        accumulate_gradient_reference(config_.precision.gradients, tensor.gradients.data(),
                                      tensor.fresh.data(), count);
      } else {
        tensor.gradients = tensor.fresh;
      }
    }
  }

  const Config::Optimizer::Group* group_of(const std::string& tensor) const {
    for (const Config::Optimizer::Group& group : config_.optimizer.groups) {
      for (const std::string& pattern : group.tensors) {
        if (fnmatch(pattern.c_str(), tensor.c_str(), 0) == 0) return &group;
      }
    }
    return nullptr;
  }

  void update(Tensor& tensor, std::uint64_t step, double learning_rate, float scale) const {
    if (tensor.is_frozen) return;
    OptimizerOptions options = config_.optimizer.options();
    if (tensor.decay == WeightDecay::kNone) options.adam.weight_decay = 0;
    if (const Config::Optimizer::Group* group = group_of(tensor.name)) {
      learning_rate *= group->learning_rate_factor;
      if (group->weight_decay) options.adam.weight_decay = *group->weight_decay;
    }
    const UpdateArrays arrays{.gradient_dtype = config_.precision.gradients,
                              .parameter = tensor.master.data(),
                              .exp_avg = tensor.exp_avg.data(),
                              .exp_avg_sq = tensor.exp_avg_sq.data(),
                              .gradient = tensor.gradients.data(),
                              .element_count = tensor.master.size()};
    update_reference(coefficients_of(options, learning_rate, step, scale), arrays);
    publish(tensor);
  }

  const Config& config_;
  ModelSpec model_;
  std::vector<std::vector<Tensor>> units_;
};

}  // namespace

ToyResult toy_oracle(const Config& config, const ToyOptions& options) {
  Oracle oracle(config, options);
  ToyResult result;
  for (std::uint64_t step = 1; step <= options.steps; ++step)
    result.reports.push_back(oracle.train_step(step, options));
  result.state = oracle.state();
  return result;
}

}  // namespace sluice::test
