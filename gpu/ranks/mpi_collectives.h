// Collectives between processes that MPI connects.
//
// Thread rule: as MessageWorld.
#pragma once

#include <string>

#include "gpu/ranks/message_collectives.h"

namespace sluice {

// The reason why MpiWorld cannot start MPI; empty if MpiWorld can start MPI. Does not start MPI.
// The reason is that the library `plugin_path` is missing, or that `plugin_path` is empty and this
// build has no library.
std::string why_no_mpi(const std::string& plugin_path = "");

class MpiWorld : public MessageWorld {
 public:
  // Starts MPI in this process through the library `plugin_path`; empty = the library of the build
  // or the installation. A process can start MPI once.
  // Fails with: kUnsupported when the library or MPI is missing; kRanks when MPI waits for other
  // ranks longer than the timeout. MPI_Init cannot be undone, so the process has to end after
  // kRanks.
  explicit MpiWorld(const HostCollectivesOptions& options, const std::string& plugin_path = "");
};

}  // namespace sluice
