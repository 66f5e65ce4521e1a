// Random configurations for store_simulation.h. Thread rule: any thread.
#pragma once

#include <random>

#include "tests/engine/store/store_simulation.h"

namespace sluice::test {

inline SimulationOptions cut_case(std::uint64_t seed, std::uint32_t ranks_max) {
  std::mt19937_64 random(seed);
  SimulationOptions options{.seed = seed};
  options.ranks = static_cast<std::uint32_t>(1 + random() % ranks_max);
  options.planes = static_cast<std::uint32_t>(1 + random() % 5);
  options.planes_in_memory = static_cast<std::uint32_t>(random() % (options.planes + 1));
  options.copies = static_cast<std::uint8_t>(2 + random() % 2);
  options.commit_every = 1 + random() % 3;
  options.is_eager = random() % 2 == 0;
  return options;
}

}  // namespace sluice::test
