// The class MpiWorld runs collectives between processes. MPI connects the processes.
//
// Thread rule: the thread rule of MessageWorld also holds here.
#pragma once

#include <string>

#include "gpu/ranks/message_collectives.h"

namespace sluice {

// Returns the reason why MpiWorld cannot start MPI. The result is empty if MpiWorld can start MPI.
// The call does not start MPI. There are two possible reasons: the library `plugin_path` is
// missing, or `plugin_path` is empty and this build has no library.
std::string why_no_mpi(const std::string& plugin_path = "");

class MpiWorld : public MessageWorld {
 public:
  // The constructor starts MPI in this process through the library `plugin_path`. If `plugin_path`
  // is empty, the call uses the library of the build or of the installation. A process can start
  // MPI only once.
  // Fails with kUnsupported if the library or MPI is missing. Fails with kRanks if MPI waits for
  // other ranks longer than the timeout. MPI_Init cannot be undone, so the process has to end after
  // a failure with kRanks.
  explicit MpiWorld(const HostCollectivesOptions& options, const std::string& plugin_path = "");
};

}  // namespace sluice
