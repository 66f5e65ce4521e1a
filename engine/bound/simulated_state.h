// A fingerprint of a simulation's state between two steps. Some values grow from step to step. For
// such a value, the caller adds only the difference between the value and the present step or time.
// If a simulation comes to the same state again, the simulation repeats itself from then on.
//
// Thread rule: one thread.
#pragma once

#include <cstdint>

namespace sluice {

class SimulatedState {
 public:
  void add(std::uint64_t value) {
    // The code applies the finalizer of splitmix64 to the sum so far.
    hash_ += 0x9e3779b97f4a7c15 + value;
    hash_ = (hash_ ^ hash_ >> 30) * 0xbf58476d1ce4e5b9;
    hash_ = (hash_ ^ hash_ >> 27) * 0x94d049bb133111eb;
    hash_ ^= hash_ >> 31;
  }

  bool operator==(const SimulatedState& other) const = default;

 private:
  std::uint64_t hash_ = 0;
};

}  // namespace sluice
