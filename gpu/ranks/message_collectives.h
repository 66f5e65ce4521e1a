// Collectives between processes on hosts. Ranks of one host share memory and read each other's
// memory (gpu/ranks/host_exchange.h). Ranks of different hosts exchange messages, over MPI
// (gpu/ranks/mpi_collectives.h) or over sockets (gpu/ranks/socket_collectives.h). Each rank sends
// pieces of its data directly to every other rank. In a reduction, the rank that receives the
// pieces adds them in rank order. Such a reduction is several times faster than MPI_Reduce_scatter.
// The bits of the result do not depend on the division of the data, or on the route of the data.
//
// Thread rule: the same as for Collectives. The thread that owns the collectives also uses the
// MessageWorld.
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
  // Fails with the exceptions of Connection::open. Fails with kRanks if Connection::open waits for
  // other ranks longer than the timeout. After the error kRanks, Connection::open is still waiting,
  // so the process has to end.
  MessageWorld(const HostCollectivesOptions& options, Connection connection);
  // The destructor does the work of leave(), but does not throw. The timeout limits the
  // destructor's wait.
  ~MessageWorld();

  // Ends the connection of this process. Some kinds of connection require that all ranks end
  // together. For such a connection, the call waits for the other ranks, unless something has
  // failed. After leave(), only abort() may be called.
  // Fails with kRanks if the wait is longer than the timeout.
  void leave();

  std::uint32_t rank() const;
  std::uint32_t rank_count() const;
  std::string version() const;
  // Returns the number of other ranks whose memory this rank reads. These ranks are on this host.
  // The number is 0 if the system does not let this rank read other ranks' memory.
  std::uint32_t neighbor_count() const;
  // The call ends every process of the run. Some launchers end all processes when one process ends.
  // Under such a launcher, the call ends only this process. The call returns if the processes have
  // not ended within the timeout. The call also returns if leave() was called earlier.
  void abort() noexcept;

  // Makes the collectives over all ranks. The function is called once. `device` and this world must
  // outlive the collectives.
  std::unique_ptr<Collectives> join(HostDevice& device);

 private:
  HostCollectivesOptions options_;
  std::unique_ptr<MessageThread> messages_;
};

}  // namespace sluice
