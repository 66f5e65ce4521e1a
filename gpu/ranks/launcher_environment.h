// Finds this process's rank in the environment that its launcher has set: Open MPI's mpirun,
// MPICH's (hydra), Slurm's srun, or torchrun. Pure in its argument.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace sluice {

struct Launch {
  std::string launcher;  // for messages: "Open MPI"
  std::uint32_t rank = 0;
  std::uint32_t rank_count = 1;
  // Its number among the ranks of this host; rank 0 of 1 unless the launcher says otherwise.
  std::uint32_t local_rank = 0;
  std::uint32_t local_rank_count = 1;
  bool knows_local_ranks = false;  // the launcher has told both
  // torchrun's meeting point; empty and 0 for other launchers.
  std::string master_address;
  std::uint16_t master_port = 0;
};

// Returns the value of a variable, or null; outside of tests this is std::getenv.
using EnvironmentLookup = std::function<const char*(const char* name)>;

// Returns nothing when no launcher is found: then there is one rank.
// Fails with: kConfig for a variable that is not a number or out of range, a launcher with
// incomplete variables, and two launchers that contradict each other; the message names both.
std::optional<Launch> find_launch(const EnvironmentLookup& environment);

}  // namespace sluice
