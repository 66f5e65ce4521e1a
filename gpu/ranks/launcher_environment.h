// The function finds this process's rank in the environment variables that the launcher of the
// process has set. The launcher is mpirun of Open MPI or of MPICH (hydra), srun of Slurm, or
// torchrun. The result depends only on the argument.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace sluice {

struct Launch {
  std::string launcher;       // the name in messages, such as "Open MPI"
  std::string rank_variable;  // the launcher has set this variable for each rank: "PMI_RANK"
  std::uint32_t rank = 0;
  std::uint32_t rank_count = 1;
  // This process's number among the ranks of this host, and the number of these ranks. If no
  // launcher tells a number, local_rank is 0, or local_rank_count is 1. Slurm tells the count in
  // the list SLURM_STEP_TASKS_PER_NODE, at the place SLURM_NODEID. srun --mpi=pmi2 sets the
  // variables of MPICH, too, so that `launcher` is MPICH; the numbers of the host come from Slurm.
  std::uint32_t local_rank = 0;
  std::uint32_t local_rank_count = 1;
  bool knows_local_ranks = false;  // a launcher has set both numbers
  // The address and port at which torchrun's ranks meet. For other launchers, the address is empty
  // and the port is 0.
  std::string master_address;
  std::uint16_t master_port = 0;
};

// A function that returns the value of a variable, or null. The function is std::getenv except in
// tests.
using EnvironmentLookup = std::function<const char*(const char* name)>;

// The result is empty if no launcher is found. The program then runs with one rank.
// Fails with kConfig if a variable is not a number or is out of range, or if a launcher's variables
// are incomplete. The call fails if a rank's number on its host is not less than the number of
// ranks there. The call also fails if the variables of two launchers contradict each other. The
// message then names both launchers. A step of Slurm of one task is no contradiction to another
// launcher, and neither is one of several if that launcher's ranks are not all on this host: they
// are the other launcher's ranks.
std::optional<Launch> find_launch(const EnvironmentLookup& environment);

}  // namespace sluice
