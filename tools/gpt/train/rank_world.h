// The ranks of a `sluice train`. Reads what the launcher says (gpu/ranks/launcher_environment.h),
// connects several ranks (by MPI, and by NCCL between GPUs), and computes this rank's share of its
// host.
//
// Thread rule: one thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "gpu/ranks/launcher_environment.h"
#include "gpu/ranks/mpi_collectives.h"
#include "gpu/ranks/nccl_collectives.h"
#include "tools/gpt/train/train_config.h"
#include "tools/gpt/train/training_device.h"

namespace sluice {

// Fails with: kConfig for settings that several ranks cannot have.
void check_ranks_config(const TrainConfig& config);

// Replaces "auto" for one of several ranks of a host. Such a rank gets a part of the cores, and
// computes on the host.
void share_host_among(std::uint32_t ranks, TrainConfig& config);

class RankWorld {
 public:
  // Starts MPI when the environment names several ranks, unless these ranks compute on GPUs and
  // torchrun tells them where to meet.
  // Fails with: kConfig for an environment that contradicts itself, or for settings that several
  // ranks cannot have; kUnsupported without MPI or NCCL, or with a launcher that does not start
  // MPI.
  explicit RankWorld(const TrainConfig& config);

  bool are_several() const { return launch_ && launch_->rank_count > 1; }
  std::uint32_t rank() const { return are_several() ? launch_->rank : 0; }
  // The number of ranks on this host.
  std::uint32_t host_ranks() const {
    return are_several() ? std::max(1u, launch_->local_rank_count) : 1;
  }
  std::uint32_t count() const { return are_several() ? launch_->rank_count : 1; }

  // Applies share_host_among() to the ranks of the host, and finds the number of ranks that "node"
  // means.
  // Fails with: kConfig.
  void share_host(TrainConfig& config) const;
  GpuChoice gpu() const;
  // Null for one rank. This object and `device` must outlive the result.
  // Fails with: kRanks, kUnsupported.
  std::unique_ptr<Collectives> join(TrainingDevice& device);

  // Closes the connections between the ranks when all ranks have come to the end. This is the last
  // call.
  // Fails with: kRanks.
  void leave();

  // Prints `failure` on standard error and ends every rank, by MPI where MPI connects them.
  // Otherwise ends this rank, and torchrun and the other ranks' deadlines notice the end.
  // Requires: are_several().
  [[noreturn]] void give_up(const std::exception& failure);

 private:
  void start_mpi();
  std::uint32_t ranks_of_node() const;
  void prepare_gpus() const;
  NcclId share_id();
  void tell_of_end(const std::string& waiting);

  const Config::Sharding sharding_;
  const bool uses_gpus_;
  std::optional<Launch> launch_;
  std::atomic<bool> has_told_ = false;
  std::unique_ptr<MpiWorld> mpi_;
  // The device for messages between hosts, by which GPU ranks tell each other where to meet.
  std::unique_ptr<HostDevice> meeting_device_;
};

}  // namespace sluice
