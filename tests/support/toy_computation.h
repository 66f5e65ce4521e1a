// The computation of the toy training (tests/support/toy_training.h). Both the oracle and the run
// through the engine use this computation. The functions are pure.
#pragma once

#include <cstdint>
#include <string>

#include "tests/support/activation_relay.h"
#include "tests/support/toy_training.h"
#include "tests/support/typed_elements.h"

namespace sluice::test {

inline std::uint64_t mix(std::uint64_t value) {  // SplitMix64's finalizer
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

inline float uniform(std::uint64_t key) {
  return static_cast<float>(static_cast<std::int64_t>(mix(key) >> 40) - (1 << 23)) * 0x1p-23f;
}

inline constexpr std::uint64_t kUsesOfRank = 1 << 20;  // makes uses of different ranks distinct
// Returns the toy computation's gradient of one element.
inline float toy_gradient(float parameter, std::uint64_t step, std::uint64_t use,
                          std::uint64_t tensor, std::uint64_t index) {
  return 0.3f * parameter + uniform(step * 1000003 + use * 10007 + tensor * 101 + (index << 20));
}

inline void fill_gradient(const Config& config, const std::byte* parameters, std::byte* gradients,
                          std::uint64_t count, std::uint64_t step, std::uint64_t use,
                          std::uint64_t tensor) {
  for (std::uint64_t i = 0; i < count; ++i) {
    const float parameter = load(config.precision.parameters, parameters, i);
    save(config.precision.gradients, gradients, i, toy_gradient(parameter, step, use, tensor, i));
  }
}

inline float initial_value(const std::string& tensor, std::uint64_t index) {
  std::uint64_t key = 7;
  for (const char letter : tensor) key = mix(key + static_cast<unsigned char>(letter));
  return uniform(key + index);
}

// Returns the uses of a step. `order` decides the sequence of these uses. A use has the same number
// in every order. The number is the use's place in horizontal order.
inline ToyUses planned_uses(const ModelSpec& model, std::uint32_t micro_batches,
                            MicroBatchOrder order) {
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

// Returns the place of a planned use. The number of the use determines the place.
inline ActivationRelay::Use activation_use_of(const ToyUse& use) {
  const auto forward = static_cast<std::uint32_t>(toy_boundary_bytes().size() + 1);
  const auto number = static_cast<std::uint32_t>(use.number % kUsesOfRank);
  const std::uint32_t place = number % (2 * forward);
  return {.position = place < forward ? place : 2 * forward - 1 - place,
          .micro_batch = number / (2 * forward),
          .pass = use.pass};
}

inline ToyUses uses_of(const ModelSpec& model, std::uint64_t step, const ToyOptions& options) {
  ToyUses uses = planned_uses(validated(model), options.micro_batches, options.order);
  if (options.change) options.change(step, uses);
  for (ToyUse& use : uses) use.number += options.rank * kUsesOfRank;
  return uses;
}

// Returns the digest of one tensor's parameters at one use. `digest` is the digest of the unit's
// previous tensor. So the digests of a unit form a chain.
std::uint64_t digest_of(const std::byte* parameters, std::uint64_t size_bytes,
                        std::uint64_t digest);

}  // namespace sluice::test
