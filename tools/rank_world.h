// The ranks of a `sluice train`: what the launcher says (gpu/launch.h), MPI where there are
// several, and this rank's share of its host.
//
// Thread rule: one thread.
#pragma once

#include <exception>
#include <memory>
#include <optional>

#include "engine/config.h"
#include "gpu/launch.h"
#include "gpu/mpi_collectives.h"

namespace sluice {

class RankWorld {
 public:
  // Starts MPI when the environment tells of several ranks.
  // Fails with: kConfig for an environment that contradicts itself, kUnsupported without MPI or
  // with a launcher that does not start it.
  explicit RankWorld(const Config::Sharding& sharding);

  bool are_several() const { return mpi_ != nullptr; }
  std::uint32_t rank() const { return are_several() ? mpi_->rank() : 0; }
  std::uint32_t count() const { return are_several() ? mpi_->rank_count() : 1; }

  // What "auto" means for one of the host's ranks: its part of memory and cores.
  void share_host(Config& config) const;
  // Null for one rank. `device` must outlive it, and so must this.
  std::unique_ptr<Collectives> join(HostDevice& device);

  // Says why on standard error, and ends every rank.
  // Requires: are_several().
  [[noreturn]] void give_up(const std::exception& failure);

 private:
  std::optional<Launch> launch_;
  std::unique_ptr<MpiWorld> mpi_;
};

}  // namespace sluice
