// Collectives between processes on hosts. Ranks of one host share memory and read each other's
// memory (gpu/ranks/host_exchange.h). Ranks of different hosts exchange messages, over MPI
// (gpu/ranks/mpi_collectives.h) or over sockets (gpu/ranks/socket_collectives.h). Each rank sends
// pieces of data directly to each other rank. In a reduction, the rank that receives the pieces
// adds them in rank order. Such a reduction is several times faster than MPI_Reduce_scatter. Its
// bits do not depend on how data is divided or routed.
//
// Thread rule: as Collectives. The thread that owns the collectives also uses the MessageWorld.
#pragma once

#include <memory>
#include <string>

#include "gpu/ranks/host_collectives.h"

namespace sluice {

struct Connection;
class MessageThread;

class MessageWorld {
 public:
  // Opens `connection`.
  // Fails with the exceptions of the connection's function, and with kRanks if that function waits
  // for other ranks longer than the timeout. After kRanks, the connection is still waiting, so the
  // process has to end.
  MessageWorld(const HostCollectivesOptions& options, Connection connection);
  // Does the work of leave(), but waits no longer than the timeout, and does not throw.
  ~MessageWorld();

  // Ends the connection of this process. The call waits for the other ranks if the connection needs
  // that, unless something has failed. No other call may follow.
  // Fails with kRanks, as the constructor does.
  void leave();

  std::uint32_t rank() const;
  std::uint32_t rank_count() const;
  std::string version() const;
  // The number of other ranks whose memory this rank reads. Only the other ranks of this host are
  // counted. The number is 0 if the system does not let this rank read their memory.
  std::uint32_t neighbor_count() const;
  // Ends every process of the run. If the launcher ends the other processes when one process ends,
  // this call ends only this process. The call returns if the processes have not ended within the
  // timeout, or if leave() was called earlier.
  void abort() noexcept;

  // Makes the collectives over all ranks. Called once. `device` and this world must outlive the
  // collectives.
  std::unique_ptr<Collectives> join(HostDevice& device);

 private:
  HostCollectivesOptions options_;
  std::unique_ptr<MessageThread> messages_;
};

}  // namespace sluice
