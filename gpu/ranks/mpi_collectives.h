// Collectives between processes on hosts: those of one host share memory and read each other's
// (gpu/ranks/host_exchange.h), others exchange MPI messages. Data goes directly between every two
// ranks in pieces; a reduction is that exchange and a sum in rank order where the pieces meet,
// which is several times faster than MPI_Reduce_scatter and gives bits that do not depend on how
// MPI cuts or routes.
//
// Thread rule: as Collectives; an MpiWorld from the thread that owns the collectives.
#pragma once

#include <memory>
#include <string>

#include "gpu/ranks/host_collectives.h"

namespace sluice {

class MessageThread;

// Why MpiWorld cannot start MPI by the library `plugin_path`, or for an empty one by its own,
// without starting it: this build has none. Empty when it is there.
std::string why_no_mpi(const std::string& plugin_path = "");

class MpiWorld {
 public:
  // Starts MPI in this process, by the library `plugin_path`; empty = where the build or the
  // installation put it. A process starts MPI once.
  // Fails with: kUnsupported when the library or MPI is missing, kRanks when MPI waits for other
  // ranks longer than the timeout: MPI_Init cannot be taken back, so the process has to end then.
  MpiWorld(const HostCollectivesOptions& options, const std::string& plugin_path = "");
  // As leave(), for the timeout at most, and silent.
  ~MpiWorld();

  // Ends MPI in this process; waits for the other ranks unless something has failed. The last call.
  // Fails with: kRanks, as above.
  void leave();

  std::uint32_t rank() const;
  std::uint32_t rank_count() const;
  std::string version() const;
  // Other ranks whose memory this one reads: those of its host, or none where the system refuses.
  std::uint32_t neighbor_count() const;
  // Ends every process of the run; returns where MPI cannot within the timeout, or after leave().
  void abort() noexcept;

  // Over all ranks; once. `device` must outlive it, and so must the world.
  std::unique_ptr<Collectives> join(HostDevice& device);

 private:
  HostCollectivesOptions options_;
  std::unique_ptr<MessageThread> messages_;
};

}  // namespace sluice
