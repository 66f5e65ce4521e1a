// The memory that the ranks of a run take, as `sluice train` reports it: pools, homes, and the most
// in use in each phase of the steps.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <sluice/engine.h>

namespace sluice {

// Memory of one rank, in bytes.
struct RankMemory {
  std::uint64_t device_pool = 0;
  std::uint64_t host_pool = 0;
  std::uint64_t nvme = 0;
  std::uint64_t peak_rss = 0;
  std::uint64_t parameters = 0;  // at home, on any tier
  std::uint64_t window = 0;
  std::uint64_t gradients = 0;  // the set, on any tier
  std::uint64_t optimizer = 0;  // records, on any tier
  PhaseMarks most_in_use;       // without the pools
};

// The memory of every rank; each rank calls it. `most_in_use` is the caller's own.
std::vector<RankMemory> memory_of_ranks(Engine& engine, const PhaseMarks& most_in_use);

// The most that was in use, by phase and tier.
std::string memory_report(const RankMemory& own);

nlohmann::ordered_json json_of(const RankMemory& rank);
// By phase: bytes by tier, and by kind. `plan` predicts with the same keys.
nlohmann::ordered_json json_of(const PhaseMarks& marks);

// The largest resident set of this process so far.
std::uint64_t peak_rss_bytes();

}  // namespace sluice
