// The report of `sluice train` about the memory that the ranks of a run use. The report lists the
// pools, the memory that contains the state, and the peak use in each phase of the steps.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <sluice/engine.h>

namespace sluice {

// The memory of one rank, in bytes.
struct RankMemory {
  std::uint64_t device_pool = 0;
  std::uint64_t host_pool = 0;
  std::uint64_t nvme = 0;
  std::uint64_t peak_rss = 0;
  std::uint64_t parameters = 0;  // homes of parameters, on any tier
  std::uint64_t window = 0;
  std::uint64_t gradients = 0;  // the gradient set, on any tier
  std::uint64_t optimizer = 0;  // records, on any tier
  PhaseMarks most_in_use;       // the peak use, without the pools
};

// Returns the memory of every rank. All ranks must make this call. Each rank passes its own
// `most_in_use`.
std::vector<RankMemory> memory_of_ranks(Engine& engine, const PhaseMarks& most_in_use);

// Returns a text about the peak memory use, by phase and tier.
std::string memory_report(const RankMemory& own);

nlohmann::ordered_json json_of(const RankMemory& rank);
// Returns the bytes by phase, tier and kind. The keys are the same as in the predictions of `sluice
// plan`.
nlohmann::ordered_json json_of(const PhaseMarks& marks);

// Returns the peak size of this process's resident set so far.
std::uint64_t peak_rss_bytes();

}  // namespace sluice
