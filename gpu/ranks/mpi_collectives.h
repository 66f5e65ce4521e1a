// Collectives between processes on hosts. Ranks of one host share memory and read each other's
// memory (gpu/ranks/host_exchange.h). Ranks of different hosts exchange MPI messages. Pieces of
// data go directly from each rank to each other rank. In a reduction, the rank that receives the
// pieces adds them in rank order. Such a reduction is several times faster than MPI_Reduce_scatter,
// and the bits do not depend on how MPI divides or routes data.
//
// Thread rule: as Collectives; the thread that owns the collectives also uses the MpiWorld.
#pragma once

#include <memory>
#include <string>

#include "gpu/ranks/host_collectives.h"

namespace sluice {

class MessageThread;

// The reason why MpiWorld cannot start MPI; empty if MpiWorld can start MPI. Does not start MPI.
// The reason is that the library `plugin_path` is missing, or that `plugin_path` is empty and this
// build has no library.
std::string why_no_mpi(const std::string& plugin_path = "");

class MpiWorld {
 public:
  // Starts MPI in this process through the library `plugin_path`; empty = the library of the build
  // or the installation. A process can start MPI once.
  // Fails with: kUnsupported when the library or MPI is missing; kRanks when MPI waits for other
  // ranks longer than the timeout. MPI_Init cannot be undone, so the process has to end after
  // kRanks.
  MpiWorld(const HostCollectivesOptions& options, const std::string& plugin_path = "");
  // As leave(), but waits no longer than the timeout, and does not throw.
  ~MpiWorld();

  // Ends MPI in this process. Waits for the other ranks unless something has failed. No other call
  // may follow. Fails with: kRanks, as the constructor.
  void leave();

  std::uint32_t rank() const;
  std::uint32_t rank_count() const;
  std::string version() const;
  // The number of other ranks whose memory this rank reads. These are the other ranks of this host;
  // 0 if the system refuses.
  std::uint32_t neighbor_count() const;
  // Ends every process of the run. Returns if MPI cannot end the processes in time, or if leave()
  // was called before.
  void abort() noexcept;

  // Makes the collectives over all ranks. Called once. `device` and this world must outlive the
  // collectives.
  std::unique_ptr<Collectives> join(HostDevice& device);

 private:
  HostCollectivesOptions options_;
  std::unique_ptr<MessageThread> messages_;
};

}  // namespace sluice
