#include "tools/gpt/train/rank_world.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/topology.h"
#include "cpu_optim/rank_sum.h"
#include "tools/cli/exit_codes.h"
#include "tools/cli/interrupt.h"
#include "tools/cli/print.h"

namespace sluice {

void check_ranks_config(const TrainConfig& config) {
  if (config.engine.sharding.reduction == RankReduction::kNccl &&
      config.device != DeviceChoice::kCuda)
    throw Error(ErrorCode::kConfig,
                "sharding.reduction \"nccl\" is for ranks on GPUs; set run.device to \"cuda\", or "
                "sharding.reduction to \"exact\"");
}

void share_host_among(std::uint32_t ranks, TrainConfig& train) {
  if (train.device != DeviceChoice::kCuda) train.device = DeviceChoice::kHost;
  unsigned& threads = train.engine.threads;
  if (threads == 0) threads = std::max(1u, granted_threads(0) / ranks);
}

RankWorld::RankWorld(const TrainConfig& config)
    : sharding_(config.engine.sharding),
      uses_gpus_(config.device == DeviceChoice::kCuda),
      launch_(find_launch(std::getenv)) {
  if (!are_several()) return;
  check_ranks_config(config);
  if (uses_gpus_) prepare_gpus();
  if (launch_->launcher != "torchrun") {
    start_mpi();
  } else if (!uses_gpus_) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("torchrun has started rank {} of {}, but ranks on hosts are connected "
                            "by MPI; start with mpirun -n {}, or set run.device to \"cuda\"",
                            launch_->rank, launch_->rank_count, launch_->rank_count));
  }
}

// Before MPI's thread runs, and before the first call of the CUDA runtime.
void RankWorld::prepare_gpus() const {
  prepare_nccl_environment();
  if (launch_->launcher == "torchrun") {
    // torchrun's own store listens at the port itself.
    const std::string meeting_point =
        fmt::format("{}:{}", launch_->master_address, launch_->master_port + 1);
    (void)::setenv("NCCL_COMM_ID", meeting_point.c_str(), /*overwrite=*/1);
  }
  if (const std::string why = why_no_nccl(); !why.empty())
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("run.device is \"cuda\" and there are {} ranks, which NCCL connects: {}",
                    launch_->rank_count, why));
}

void RankWorld::start_mpi() {
  try {
    mpi_ = std::make_unique<MpiWorld>(HostCollectivesOptions{
        .timeout_s = sharding_.timeout_s,
        .sum = sum_in_order,
        .on_wait = [this](const std::string& waiting) { tell_of_end(waiting); }});
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kRanks) give_up(error);  // the launcher ends the others
    throw;
  }
  if (mpi_->rank() != launch_->rank || mpi_->rank_count() != launch_->rank_count)
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("{} says that this is rank {} of {}, MPI ({}) that it is rank {} of {}; "
                    "start with the mpirun of that MPI, or srun --mpi=pmix",
                    launch_->launcher, launch_->rank, launch_->rank_count, mpi_->version(),
                    mpi_->rank(), mpi_->rank_count()));
}

void RankWorld::share_host(TrainConfig& train) const {
  if (!are_several()) return;
  Config& config = train.engine;
  if (config.sharding.group_is_node) {
    config.sharding.group_ranks = ranks_of_node();
    config.sharding.group_is_node = false;
  }
  share_host_among(host_ranks(), train);
}

// Ranks of a host have to follow each other, or a group would span hosts.
std::uint32_t RankWorld::ranks_of_node() const {
  const std::uint32_t local = launch_->local_rank_count;
  if (!launch_->knows_local_ranks)
    throw Error(ErrorCode::kConfig,
                fmt::format("sharding.group is \"node\", but {} does not tell how many ranks a "
                            "host has; set sharding.group to that number",
                            launch_->launcher));
  if (launch_->rank_count % local != 0 || launch_->rank % local != launch_->local_rank)
    throw Error(ErrorCode::kConfig,
                fmt::format("sharding.group is \"node\", but rank {} of {} is number {} of {} on "
                            "its host; start equally many ranks on every host, one host after the "
                            "other (mpirun --map-by slot)",
                            launch_->rank, launch_->rank_count, launch_->local_rank, local));
  return local;
}

// A launcher may show each rank all GPUs of its host, or one.
GpuChoice RankWorld::gpu() const {
  if (!are_several() || !uses_gpus_) return {};
  const int gpus = std::max(1, cuda_device_count());
  return {.ordinal = static_cast<int>(launch_->local_rank) % gpus,
          .memory_source = nccl_memory_source()};
}

std::unique_ptr<Collectives> RankWorld::join(TrainingDevice& device) {
  if (!are_several()) return nullptr;
  if (device.gpu() == nullptr) return mpi_->join(*device.host());
  return make_nccl_collectives(
      *device.gpu(),
      {.timeout_s = sharding_.timeout_s,
       .reduction = sharding_.reduction == RankReduction::kNccl ? NcclReduction::kPlain
                                                                : NcclReduction::kExact},
      share_id(), rank(), count());
}

// Under torchrun NCCL_COMM_ID makes every rank's the same.
NcclId RankWorld::share_id() {
  NcclId id{};
  if (rank() == 0 || mpi_ == nullptr) id = make_nccl_id();
  if (mpi_ == nullptr) return id;
  meeting_device_ = make_host_device({.memory_bytes = 1_MiB});
  const std::unique_ptr<Collectives> hosts = mpi_->join(*meeting_device_);
  const Stream stream(*meeting_device_, "meeting");
  const DeviceBuffer data(*meeting_device_, id.size(), "NCCL's id");
  std::memcpy(data.data(), id.data(), id.size());
  hosts->broadcast({.data = data.data(), .size_bytes = id.size(), .subject = "NCCL's id"},
                   stream.id());
  meeting_device_->synchronize(stream.id());
  std::memcpy(id.data(), data.data(), id.size());
  return id;
}

// A launcher that has lost a rank ends the others, which know the missing one.
void RankWorld::tell_of_end(const std::string& waiting) {
  if (!interrupted() || has_told_.exchange(true)) return;
  warn("sluice: rank {} of {}: told to end while {}\n", launch_->rank, launch_->rank_count,
       waiting);
}

void RankWorld::leave() {
  if (mpi_ != nullptr) mpi_->leave();
}

void RankWorld::give_up(const std::exception& failure) {
  warn("sluice: rank {} of {}: {}\n", rank(), count(), failure.what());
  std::fflush(nullptr);
  if (mpi_ != nullptr) mpi_->abort();
  const auto* const error = dynamic_cast<const Error*>(&failure);
  ::_exit(error != nullptr ? exit_code_of(error->code()) : kExitInternal);
}

}  // namespace sluice
