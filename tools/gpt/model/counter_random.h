// Random numbers without state. The number at position `index` of a named stream is a hash of
// (seed, stream, index). The numbers therefore do not depend on the order of the computations, or
// on the thread that computes. The class is pure.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <string_view>

namespace sluice::gpt {

class CounterRandom {
 public:
  CounterRandom(std::uint64_t seed, std::string_view stream)
      : key_(mixed(mixed(seed) ^ name_hash(stream))) {}

  // Returns 64 independent bits for position `index`. The bits are computed by SplitMix64 (Steele,
  // Lea, Flood 2014).
  constexpr std::uint64_t bits(std::uint64_t index) const {
    return mixed(key_ + (index + 1) * 0x9e3779b97f4a7c15u);
  }

  // A uniform number in [0, 1). The number is a multiple of 2^-53.
  constexpr double uniform(std::uint64_t index) const {
    return static_cast<double>(bits(index) >> 11) * 0x1p-53;
  }

  // A standard normal number. The method of Box and Muller (1958) computes the number from two
  // uniform numbers, at the positions 2 * index and 2 * index + 1. The method's second result is
  // not used. The value at an index therefore depends on no other index.
  double normal(std::uint64_t index) const {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform(2 * index)));
    return radius * std::cos(2.0 * std::numbers::pi * uniform(2 * index + 1));
  }

 private:
  static constexpr std::uint64_t mixed(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  // The hash is FNV-1a. The hash of the name identifies a stream, so a tensor keeps its values when
  // other tensors are added to the model.
  static constexpr std::uint64_t name_hash(std::string_view name) {
    std::uint64_t hash = 0xcbf29ce484222325u;
    for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    return hash;
  }

  std::uint64_t key_;  // constant after construction
};

}  // namespace sluice::gpt
