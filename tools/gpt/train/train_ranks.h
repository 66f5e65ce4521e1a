// The ranks of a run of `sluice train`. A TrainRanks has a RankWorld (sluice/rank_world.h), and
// gives this rank its share of the host. A TrainRanks ends the process when a rank fails.
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

// Returns a text such as " in groups of 4". The text describes the groups in which the ranks divide
// the state or add up the gradients. The text is empty if there are no groups.
std::string describe_levels(const Config::Sharding& sharding, std::uint32_t ranks);

// Fails with kConfig if the settings in `config` are not possible with several ranks.
void check_ranks_config(const TrainConfig& config);

// Replaces "auto" in `config` with values for one rank. The host has `ranks` ranks. The rank then
// computes on the host, and gets its part of the host's cores.
void share_host_among(std::uint32_t ranks, TrainConfig& config);

class TrainRanks {
 public:
  // Fails with the errors of RankWorld. If other ranks do not arrive, the constructor prints the
  // failure and ends the process. The process cannot go on, because MPI still waits for the missing
  // ranks.
  explicit TrainRanks(const TrainConfig& config);

  bool are_several() const { return world_->are_several(); }
  std::uint32_t rank() const { return world_->rank(); }
  // The number of ranks on this host.
  std::uint32_t host_ranks() const { return world_->host_ranks(); }
  std::uint32_t count() const { return world_->count(); }

  // Calls share_host_among() for the ranks of this host. Also replaces "node" in `config` with the
  // number of ranks on a node.
  // Fails with the errors of RankWorld::shared().
  void share_host(TrainConfig& config) const;
  GpuChoice gpu() const;
  // Returns null if there is only one rank. This object and `device` must outlive the result.
  // Fails with the errors of RankWorld::join().
  std::unique_ptr<Collectives> join(ComputeDevice& device);

  // Closes the connections between the ranks when all ranks have called leave(). After leave(), no
  // other function of this object may be called. `code` is the process's exit code. If a signal has
  // ended the run and the connections do not close soon, the call ends the process with `code`: a
  // launcher that got the signal, too, no longer helps to close them.
  // Fails with kRanks if another rank does not call leave() within the timeout.
  void leave(int code);

  // Prints `failure` on standard error, and ends every rank. If MPI connects the ranks, MPI ends
  // all ranks. Otherwise, the call ends this rank, and torchrun or a deadline ends the other ranks.
  // Requires: are_several().
  [[noreturn]] void give_up(const std::exception& failure);

 private:
  void tell_of_end(const std::string& waiting);

  std::atomic<bool> has_told_ = false;
  std::atomic<int> leaving_code_ = -1;  // of leave(); -1 before
  std::unique_ptr<RankWorld> world_;
};

}  // namespace sluice
