// Which rank this process is, as whoever started it has put into the environment: Open MPI's
// mpirun, MPICH's (hydra), Slurm's srun, or torchrun. Pure in its argument.
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
  // Among the ranks of this host; of one unless the launcher tells.
  std::uint32_t local_rank = 0;
  std::uint32_t local_rank_count = 1;
  bool knows_local_ranks = false;  // the launcher has told both
  // torchrun's meeting point; empty and 0 from the others.
  std::string master_address;
  std::uint16_t master_port = 0;
};

// The value of a variable, or null; std::getenv outside of tests.
using EnvironmentLookup = std::function<const char*(const char* name)>;

// Nothing when no launcher is found: one rank.
// Fails with: kConfig for a variable that is no number or out of range, a launcher whose variables
// are incomplete, and two launchers that say different things; the message names both.
std::optional<Launch> find_launch(const EnvironmentLookup& environment);

}  // namespace sluice
