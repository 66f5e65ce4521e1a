// A random run for tests of planning. The run may be of any kind that can be planned. A run has a
// small model, a config, and ranks. The same seed gives the same run. Thread rule: one thread.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <string>
#include <utility>

#include <fmt/format.h>

#include <sluice/config.h>
#include <sluice/error.h>
#include <sluice/model_spec.h>
#include <sluice/plan.h>
#include "engine/plan/sharding.h"

namespace sluice::test {

class RandomRun {
 public:
  explicit RandomRun(std::uint64_t seed) : random_(seed) {
    make_model();
    make_config();
  }

  const ModelSpec& model() const { return model_; }  // validated()
  const Config& config() const { return config_; }   // without budgets and paths
  // A machine whose device is large enough for every model of this class.
  const RunMachine& machine() const { return machine_; }

  std::uint64_t below(std::uint64_t limit) { return random_() % limit; }
  bool one_in(std::uint64_t count) { return below(count) == 0; }
  // Returns a random number from 1 to `most`, with a random magnitude.
  std::uint64_t any_magnitude(double most) {
    return static_cast<std::uint64_t>(
        std::exp2(std::uniform_real_distribution<double>(0, std::log2(most))(random_)));
  }
  std::string describe() const {
    return fmt::format("{} units, {} ranks, group {}, stage {}, leases {}, micro-batches {}",
                       model_.units.size(), machine_.ranks, config_.sharding.group_ranks,
                       config_.sharding.stage, model_.concurrent_leases,
                       config_.activations.micro_batches);
  }

 private:
  template <class T>
  T any_of(std::initializer_list<T> values) {
    return values.begin()[below(values.size())];
  }

  void make_model() {
    const std::uint64_t units = 1 + below(8);
    const bool are_equal = one_in(3);
    const std::uint64_t size = any_magnitude(200'000);
    bool may_freeze = units > 1 && one_in(3);
    for (std::uint64_t unit = 0; unit < units; ++unit) {
      const std::string name = "u" + std::to_string(unit);
      model_.units.push_back(
          {.name = name,
           .tensors = {{.name = name + ".w", .shape = {are_equal ? size : any_magnitude(2e5)}}},
           .is_frozen = may_freeze && unit + 1 < units && one_in(2)});
      model_.forward_order.push_back(UnitId{static_cast<std::uint32_t>(unit)});
    }
    if (one_in(3)) model_.forward_order.push_back(UnitId{0});
    model_.concurrent_leases = 1 + static_cast<std::uint32_t>(below(4));
    config_.activations.home = any_of({ActivationHome::kKeep, ActivationHome::kRecompute,
                                       ActivationHome::kHost, ActivationHome::kNvme});
    if (config_.activations.home != ActivationHome::kKeep)
      model_.boundary_bytes.assign(model_.forward_order.size() - 1, any_magnitude(3e5));
    model_ = validated(model_);
    config_.activations.micro_batches = 1 + static_cast<std::uint32_t>(below(4));
    if (one_in(2) && config_.activations.home != ActivationHome::kKeep)
      config_.activations.order = MicroBatchOrder::kVertical;
  }

  void make_config() {
    machine_.ranks = any_of({1u, 1u, 2u, 3u, 4u, 6u});
    config_.sharding.stage = static_cast<std::uint32_t>(below(4));
    config_.sharding.keep_gathered_bytes = any_of<std::uint64_t>({0, 4096, 65536, 262144});
    if (one_in(2)) config_.sharding.group_ranks = any_of({1u, 2u, machine_.ranks});
    if (machine_.ranks % std::max(1u, config_.sharding.group_ranks) != 0)
      config_.sharding.group_ranks = 0;
    config_.storage.block_elements = any_of<std::uint64_t>({4096, 16384, 65536});
    config_.optimizer.overlap = any_of({OverlapPolicy::kSerial, OverlapPolicy::kDeferred});
    config_.optimizer.kind = any_of({OptimizerKind::kAdamW, OptimizerKind::kLion});
    if (one_in(4)) config_.optimizer.lanes = 1 + static_cast<std::uint32_t>(below(9));
    config_.precision.parameters = any_of({DType::kBf16, DType::kFp32, DType::kFp16});
    config_.precision.gradients = one_in(4) ? DType::kFp32 : config_.precision.parameters;
    machine_.device_is_host = !one_in(2);
    using enum TierChoice;
    while (true) {
      config_.placement = {.parameters = any_of({kAuto, kAuto, kDevice, kHost, kNvme}),
                           .optimizer = any_of({kAuto, kAuto, kDevice, kHost, kNvme}),
                           .gradients = any_of({kAuto, kAuto, kDevice, kHost, kNvme})};
      try {
        validate(config_);
        check_homes(config_.sharding, machine_.ranks, config_.placement);
        return;
      } catch (const Error&) {
        continue;  // this combination of homes is not allowed
      }
    }
  }

  std::mt19937_64 random_;
  ModelSpec model_;
  Config config_;
  RunMachine machine_;
};

}  // namespace sluice::test
