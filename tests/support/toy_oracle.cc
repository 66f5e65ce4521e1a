// The oracle of the toy training: the same in plain arrays.
#include <fnmatch.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/moment_rounding.h"
#include "base/norm_accumulator.h"
#include "base/optimizer_math.h"
#include "cpu_optim/gradient_ops.h"
#include "cpu_optim/optimizer_options.h"
#include "cpu_optim/update.h"
#include "engine/config/config_text.h"
#include "tests/support/evaluated_batches.h"
#include "tests/support/toy_computation.h"

namespace sluice::test {
namespace {

// The job in plain arrays: what the engine must equal bit for bit.
class Oracle {
 public:
  Oracle(const Config& config, const ToyOptions& options)
      : config_(config), model_(validated(toy_model_of(options))) {
    for (const UnitSpec& spec : model_.units) {
      std::vector<Tensor>& tensors = units_.emplace_back();
      for (const TensorSpec& tensor : spec.tensors) {
        tensors.push_back(make_tensor(tensor));
        tensors.back().is_frozen = spec.is_frozen;
        tensors.back().number = tensor_count_++;
      }
    }
  }

  StepReport train_step(std::uint64_t step, const ToyOptions& options) {
    for (const ToyUse& use : uses_of(model_, step, options)) see(step - 1, use.unit, use.pass);
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
    for (std::size_t unit = 0; unit < units_.size(); ++unit) {
      const bool stays =
          config_.optimizer.untouched == UntouchedPolicy::kSkip && !is_touched_[unit];
      if (stays && !model_.units[unit].is_frozen) ++report.untouched_units;
      for (Tensor& tensor : units_[unit])
        if (!stays) update(tensor, step, options.learning_rate, scale);
    }
    return report;
  }

  // An evaluation's uses, after `step`.
  void evaluate(std::uint64_t step) {
    for (const UnitId unit : model_.forward_order) see(step, unit, Pass::kInference);
  }

  const ToySights& sights() const { return sights_; }

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
    std::uint64_t number = 0;  // in the model
    std::uint64_t updates = 0;
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

  void see(std::uint64_t version, UnitId unit, Pass pass) {
    std::uint64_t digest = 0;
    for (const Tensor& tensor : units_[index_of(unit)])
      digest = digest_of(tensor.parameters.data(), tensor.parameters.size(), digest);
    sights_.push_back({version, unit, pass, digest, digest});
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
    is_touched_.assign(units_.size(), false);
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
        // Gradients of announced units are added over the ranks at every use.
        const bool is_announced = model_.units[unit].is_announced;
        if (is_announced && pass != 0) continue;
        add_gradients(units_[unit], seen[unit], step, use,
                      {.first = is_announced ? 0 : pass,
                       .count = is_announced ? options.rank_count : ranks,
                       .computes = is_announced ? options.computes : nullptr});
        seen[unit] = is_touched_[unit] = true;
      }
      for_each_tensor([&](Tensor& tensor) { sums[&tensor].push_back(tensor.gradients); });
    }
    for (std::size_t unit = 0; unit < units_.size(); ++unit) {
      for (Tensor& t : units_[unit])
        t.gradients = model_.units[unit].is_announced ? sums[&t].front()
                                                      : sum_over_ranks(sums[&t], t.master.size());
    }
  }

  // Rank order in each group or node, then these in order, fp32, one rounding.
  std::vector<std::byte> sum_over_ranks(const Parts& parts, std::size_t count) const {
    const DType type = config_.precision.gradients;
    const std::size_t given = config_.sharding.reduction == RankReduction::kNodes
                                  ? config_.sharding.node_ranks
                                  : config_.sharding.group_ranks;
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

  // The ranks that are added at once.
  struct AddedRanks {
    std::uint32_t first = 0;
    std::uint32_t count = 1;
    std::function<bool(std::uint32_t rank, const ToyUse& use)> computes;
  };

  void add_gradients(std::vector<Tensor>& unit, bool has_some, std::uint64_t step,
                     const ToyUse& use, const AddedRanks& ranks) const {
    for (std::size_t i = 0; i < unit.size(); ++i) {
      Tensor& tensor = unit[i];
      const std::size_t count = tensor.master.size();
      Parts parts;
      for (std::uint32_t rank = ranks.first; rank < ranks.first + ranks.count; ++rank) {
        std::ranges::fill(tensor.fresh, std::byte{0});
        if (!ranks.computes || ranks.computes(rank, use))
          fill_gradient(config_, tensor.parameters.data(), tensor.fresh.data(), count, step,
                        use.number + rank * kUsesOfRank, i);
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

  // The moments become what their 8-bit codes mean, in groups that begin with the tensor.
  static void through_codes(CodeBook book, std::vector<float>& moments) {
    for (std::size_t begin = 0; begin < moments.size(); begin += 256) {
      const auto group =
          std::span(moments).subspan(begin, std::min<std::size_t>(256, moments.size() - begin));
      float scale = 0;
      for (const float moment : group) scale = std::max(scale, std::fabs(moment));
      for (float& moment : group)
        moment = decode_moment(book, encode_moment(book, moment, scale), scale);
    }
  }

  // The moments of tensor number `tensor` go to the neighbor in bf16 that their random bits choose.
  void through_bf16(std::vector<float>& moments, std::uint64_t tensor, std::uint64_t step,
                    unsigned shift) const {
    const std::uint64_t key =
        rounding_key_of_tensor(rounding_key_of_step(config_.optimizer.rounding_seed, step), tensor);
    for (std::size_t i = 0; i < moments.size(); ++i) {
      const std::uint32_t random = random_bits(rounding_words(key, i), i) >> shift & 0xffff;
      const std::uint32_t bits = bits_from_float(moments[i]);
      const bool goes_up = (bits & 0xffff) + random >= 0x10000;
      moments[i] = float_from_bits((bits & 0xffff0000) + (goes_up ? 0x10000 : 0));
    }
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
    update_reference(coefficients_of(options, learning_rate, ++tensor.updates, scale), arrays);
    if (config_.optimizer.state == OptimizerState::k8bit) {
      if (keeps_exp_avg(options.kind)) through_codes(CodeBook::kSigned, tensor.exp_avg);
      if (keeps_exp_avg_sq(options.kind)) through_codes(CodeBook::kUnsigned, tensor.exp_avg_sq);
    }
    if (config_.optimizer.state == OptimizerState::kBf16) {
      through_bf16(tensor.exp_avg, tensor.number, step, 0);
      through_bf16(tensor.exp_avg_sq, tensor.number, step, 16);
    }
    publish(tensor);
  }

  const Config& config_;
  ModelSpec model_;
  std::uint64_t tensor_count_ = 0;
  std::vector<std::vector<Tensor>> units_;
  std::vector<bool> is_touched_;  // by unit, in the step
  ToySights sights_;
};

// Keeps what the results depend on. The oracle gets nothing else of a config, so two configs with
// the same text have the same results.
Config config_of_results(const Config& config) {
  Config kept;
  kept.precision = config.precision;
  kept.optimizer = config.optimizer;
  const Config::Optimizer usual;
  kept.optimizer.overlap = usual.overlap;
  kept.optimizer.update_on = usual.update_on;
  kept.optimizer.lanes = usual.lanes;
  kept.sharding.reduction = config.sharding.reduction;
  kept.sharding.group_ranks = config.sharding.group_ranks;
  kept.sharding.node_ranks = config.sharding.node_ranks;
  kept.activations.home = config.activations.home;
  return kept;
}

ToyResult train_oracle(const Config& config, const ToyOptions& options) {
  Oracle oracle(config, options);
  ToyResult result;
  for (std::uint64_t step = 1; step <= options.steps; ++step) {
    result.reports.push_back(oracle.train_step(step, options));
    for (std::uint32_t batch = 0; options.evaluate && batch < kEvaluatedBatches; ++batch)
      oracle.evaluate(step);
  }
  result.state = oracle.state();
  result.sights = oracle.sights();
  if (config.activations.home != ActivationHome::kKeep) {
    // Each boundary is read by the next forward use, and two of each are read in backward.
    const std::uint64_t of_step =
        3 * options.micro_batches + (options.evaluate ? kEvaluatedBatches : 0);
    result.activations_seen = options.steps * of_step * toy_boundary_bytes().size();
  }
  return result;
}

// The results that this process has computed: most tests differ in placement alone. A third of the
// processor time of these tests was the oracle's.
class KnownResults {
 public:
  ToyResult of(const Config& config, const ToyOptions& options) {
    const std::string key = fmt::format(
        "{} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {}", config_text(config),
        config.sharding.node_ranks, options.steps, options.micro_batches, options.learning_rate,
        static_cast<int>(options.order), options.evaluate, fmt::join(options.frozen_units, ","),
        static_cast<int>(options.size), options.leases, options.has_boundaries, options.experts,
        options.announces_ahead, options.rank, options.rank_count, options.reduces_each);
    const std::lock_guard lock(mutex_);
    for (const auto& [known, result] : results_)
      if (known == key) return result;
    if (results_.size() == kResultsMax) results_.pop_front();
    return results_.emplace_back(key, train_oracle(config, options)).second;
  }

 private:
  static constexpr std::size_t kResultsMax = 12;  // 2 MB each
  std::mutex mutex_;
  std::deque<std::pair<std::string, ToyResult>> results_;
};

}  // namespace

ToyResult toy_oracle(const Config& config, const ToyOptions& options) {
  static KnownResults known;
  const Config of_results = config_of_results(config);
  // Nothing tells functions apart.
  if (options.change || options.computes) return train_oracle(of_results, options);
  return known.of(of_results, options);
}

}  // namespace sluice::test
