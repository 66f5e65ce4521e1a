#include "tools/rank_world.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include <fmt/format.h>

#include "base/topology.h"
#include "cpu_optim/ordered_sum.h"

namespace sluice {

RankWorld::RankWorld(const Config::Sharding& sharding) : launch_(find_launch(std::getenv)) {
  if (!launch_ || launch_->rank_count == 1) return;
  if (launch_->launcher == "torchrun")
    throw Error(ErrorCode::kUnsupported,
                fmt::format("torchrun has started rank {} of {}, but ranks on hosts are connected "
                            "by MPI; start with mpirun -n {}",
                            launch_->rank, launch_->rank_count, launch_->rank_count));
  mpi_ = std::make_unique<MpiWorld>(
      HostCollectivesOptions{.timeout_s = sharding.timeout_s, .sum = sum_in_order});
  if (mpi_->rank() != launch_->rank || mpi_->rank_count() != launch_->rank_count)
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("{} says that this is rank {} of {}, MPI ({}) that it is rank {} of {}; "
                    "start with the mpirun of that MPI, or srun --mpi=pmix",
                    launch_->launcher, launch_->rank, launch_->rank_count, mpi_->version(),
                    mpi_->rank(), mpi_->rank_count()));
}

void RankWorld::share_host(Config& config) const {
  if (!are_several()) return;
  const std::uint32_t ranks = std::max(1u, launch_->local_rank_count);
  const std::uint64_t memory_bytes = topology().memory_bytes;
  if (!config.memory.device_bytes) config.memory.device_bytes = memory_bytes / 4 / ranks;
  if (!config.memory.host_bytes) config.memory.host_bytes = memory_bytes / 2 / ranks;
  if (config.threads == 0) config.threads = std::max(1u, granted_threads(0) / ranks);
}

std::unique_ptr<Collectives> RankWorld::join(HostDevice& device) {
  return are_several() ? mpi_->join(device) : nullptr;
}

void RankWorld::give_up(const std::exception& failure) {
  fmt::print(stderr, "sluice: rank {} of {}: {}\n", rank(), count(), failure.what());
  std::fflush(nullptr);
  mpi_->abort();
  ::_exit(1);
}

}  // namespace sluice
