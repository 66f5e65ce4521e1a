// In these cases, the units of a step are chosen while the step runs. The toy model has four layers
// with experts, and random numbers act as the router. The functions are pure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "tests/support/toy_training.h"

namespace sluice::test {

inline constexpr std::uint32_t kLayers = 4;
inline constexpr std::uint32_t kExpertsOfLayer = 5;
inline constexpr std::uint32_t kExperts = kLayers * kExpertsOfLayer;
inline constexpr std::uint32_t kFirstExpert = 6;  // after the toy model's own units

// Returns the experts of one layer in one micro-batch, in ascending order. The result has `active`
// experts. If `active` is 0, the number of experts is random.
inline std::vector<UnitId> routed(std::uint64_t key, std::uint32_t layer,
                                  std::uint32_t active = 0) {
  std::mt19937_64 random(key);
  std::vector<UnitId> experts;
  for (std::uint32_t i = 0; i < kExpertsOfLayer; ++i)
    experts.push_back(UnitId{kFirstExpert + layer * kExpertsOfLayer + i});
  std::ranges::shuffle(experts, random);
  experts.resize(active == 0 ? random() % (kExpertsOfLayer + 1) : active);
  std::ranges::sort(experts);
  return experts;
}

// Adds uses of each layer's experts. In the forward pass, these uses come after the layer's use. In
// the backward pass, these uses come before the layer's use.
inline void route(std::uint64_t seed, std::uint64_t step, ToyUses& uses, std::uint32_t active = 0) {
  ToyUses routed_uses;
  std::uint64_t number = 1000;
  std::uint64_t micro_batch = 0;
  for (std::size_t i = 0; i < uses.size(); ++i) {
    const ToyUse use = uses[i];
    const std::uint32_t layer = index_of(use.unit) - 1;
    const bool has_experts = layer < kLayers;
    const bool is_forward = use.pass == Pass::kForward;
    if (is_forward && i > 0 && uses[i - 1].pass == Pass::kBackward) ++micro_batch;
    const auto add_experts = [&] {
      const std::uint64_t key = seed * 1'000'003 + step * 1009 + micro_batch * 101 + layer;
      for (const UnitId expert : routed(key, layer, active))
        routed_uses.push_back({expert, use.pass, number++});
    };
    if (has_experts && !is_forward) add_experts();
    routed_uses.push_back(use);
    if (has_experts && is_forward) add_experts();
  }
  uses = routed_uses;
}

inline ToyOptions routed_options(std::uint64_t seed, std::uint32_t active = 0) {
  return {.steps = 4,
          .change = [seed, active](std::uint64_t step,
                                   ToyUses& uses) { route(seed, step, uses, active); },
          .experts = kExperts};
}

}  // namespace sluice::test
