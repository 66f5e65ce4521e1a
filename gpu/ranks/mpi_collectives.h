// Collectives between processes on hosts: ranks of one host share memory and read each other's
// (gpu/ranks/host_exchange.h), others exchange MPI messages. Data goes directly between every two
// ranks in pieces. A reduction is that exchange plus a sum in rank order where the pieces meet.
// This is several times faster than MPI_Reduce_scatter, and its bits do not depend on how MPI cuts
// or routes.
//
// Thread rule: as Collectives; an MpiWorld on the thread that owns the collectives.
#pragma once

#include <memory>
#include <string>

#include "gpu/ranks/host_collectives.h"

namespace sluice {

class MessageThread;

// The reason why MpiWorld cannot start MPI, found without starting it: there is no library
// `plugin_path`, or, if that is empty, this build has none. Empty when MpiWorld can.
std::string why_no_mpi(const std::string& plugin_path = "");

class MpiWorld {
 public:
  // Starts MPI in this process through the library `plugin_path`; empty = where the build or the
  // installation put it. A process starts MPI once.
  // Fails with: kUnsupported when the library or MPI is missing; kRanks when MPI waits for other
  // ranks longer than the timeout. MPI_Init cannot be taken back, so the process then has to end.
  MpiWorld(const HostCollectivesOptions& options, const std::string& plugin_path = "");
  // As leave(), but for at most the timeout, and without errors.
  ~MpiWorld();

  // Ends MPI in this process; waits for the other ranks unless something has failed. It is the last
  // call. Fails with: kRanks, as above.
  void leave();

  std::uint32_t rank() const;
  std::uint32_t rank_count() const;
  std::string version() const;
  // How many other ranks' memory this one reads: those of its host, or 0 where the system refuses.
  std::uint32_t neighbor_count() const;
  // Ends every process of the run; returns if MPI cannot do so in time, or after leave().
  void abort() noexcept;

  // Makes the collectives over all ranks; once. `device` and this world must outlive them.
  std::unique_ptr<Collectives> join(HostDevice& device);

 private:
  HostCollectivesOptions options_;
  std::unique_ptr<MessageThread> messages_;
};

}  // namespace sluice
