// The ranks of a `sluice train`. A TrainRanks has a RankWorld (sluice/rank_world.h) and this rank's
// share of its host, and ends the process when a rank fails.
//
// Thread rule: one thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include <sluice/rank_world.h>
#include "tools/gpt/train/compute_device.h"
#include "tools/gpt/train/train_config.h"

namespace sluice {

// A text such as " in groups of 4", which says how `ranks` ranks divide the state or their sums.
// The text is empty for one level.
std::string describe_levels(const Config::Sharding& sharding, std::uint32_t ranks);

// Fails with kConfig if several ranks cannot have these settings.
void check_ranks_config(const TrainConfig& config);

// The function replaces "auto" for one of several ranks of a host. Such a rank gets a part of the
// cores. Such a rank computes on the host.
void share_host_among(std::uint32_t ranks, TrainConfig& config);

class TrainRanks {
 public:
  // Fails with the errors of RankWorld. If MPI waits in vain for other ranks, the constructor
  // prints the failure and ends the process.
  explicit TrainRanks(const TrainConfig& config);

  bool are_several() const { return world_->are_several(); }
  std::uint32_t rank() const { return world_->rank(); }
  // The number of ranks on this host.
  std::uint32_t host_ranks() const { return world_->host_ranks(); }
  std::uint32_t count() const { return world_->count(); }

  // The call does the work of share_host_among() for the ranks of the host, and finds the number of
  // ranks that "node" means.
  // Fails with kConfig.
  void share_host(TrainConfig& config) const;
  GpuChoice gpu() const;
  // The result is null for one rank. This object and `device` must outlive the result.
  // Fails with kRanks or kUnsupported.
  std::unique_ptr<Collectives> join(ComputeDevice& device);

  // Closes the connections between the ranks when all ranks have called leave(). This call is the
  // last call of the object.
  // Fails with kRanks.
  void leave() { world_->leave(); }

  // Prints `failure` on standard error, and ends every rank. If MPI connects the ranks, MPI ends
  // them. Otherwise the call ends this rank, and torchrun or a deadline ends the other ranks.
  // Requires: are_several().
  [[noreturn]] void give_up(const std::exception& failure);

 private:
  void tell_of_end(const std::string& waiting);

  std::atomic<bool> has_told_ = false;
  std::unique_ptr<RankWorld> world_;
};

}  // namespace sluice
