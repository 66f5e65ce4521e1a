#include "tools/gpt/train/train_ranks.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include <sluice/error.h>
#include "base/topology.h"
#include "gpu/ranks/launcher_environment.h"
#include "tools/cli/exit_codes.h"
#include "tools/cli/interrupt.h"
#include "tools/cli/print.h"

namespace sluice {
namespace {

// This process, as its launcher describes it, before there is a world.
Launch own_launch() {
  return find_launch(std::getenv).value_or(Launch());
}

[[noreturn]] void end_process(const std::exception& failure) {
  const auto* const error = dynamic_cast<const Error*>(&failure);
  ::_exit(error != nullptr ? exit_code_of(error->code()) : kExitInternal);
}

void print_failure(std::uint32_t rank, std::uint32_t count, const std::exception& failure) {
  warn("sluice: rank {} of {}: {}\n", rank, count, failure.what());
  std::fflush(nullptr);
}

}  // namespace

std::string describe_levels(const Config::Sharding& sharding, std::uint32_t ranks) {
  if (sharding.reduction == RankReduction::kNodes && sharding.node_ranks < ranks)
    return fmt::format(" that add gradients in nodes of {}", sharding.node_ranks);
  if (sharding.group_ranks != 0) return fmt::format(" in groups of {}", sharding.group_ranks);
  return "";
}

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

TrainRanks::TrainRanks(const TrainConfig& config) {
  try {
    world_ = std::make_unique<RankWorld>(RankWorldOptions{
        .device = config.device == DeviceChoice::kCuda ? RankDevice::kGpu : RankDevice::kHost,
        .sharding = config.engine.sharding,
        .on_wait = [this](const std::string& waiting) { tell_of_end(waiting); }});
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kRanks) throw;
    // MPI waits inside this process; the launcher ends the others.
    const Launch launch = own_launch();
    print_failure(launch.rank, launch.rank_count, error);
    end_process(error);
  }
}

void TrainRanks::share_host(TrainConfig& train) const {
  if (!are_several()) return;
  train.engine = world_->shared(train.engine);
  share_host_among(host_ranks(), train);
}

GpuChoice TrainRanks::gpu() const {
  const CudaDeviceOptions options = world_->gpu();
  return {.ordinal = options.ordinal, .memory_source = options.memory_source};
}

std::unique_ptr<Collectives> TrainRanks::join(ComputeDevice& device) {
  if (!are_several()) return nullptr;
  return device.gpu() != nullptr ? world_->join(*device.gpu()) : world_->join(*device.host());
}

void TrainRanks::leave(int code) {
  leaving_code_.store(code);
  world_->leave();
}

// A launcher that has lost a rank ends the others, which know the missing one.
void TrainRanks::tell_of_end(const std::string& waiting) {
  if (const int code = leaving_code_.load(); interrupted() && code >= 0) {
    std::fflush(nullptr);
    ::_exit(code);
  }
  if (!interrupted() || has_told_.exchange(true)) return;
  const Launch launch = own_launch();
  warn("sluice: rank {} of {}: told to end while {}\n", launch.rank, launch.rank_count, waiting);
}

void TrainRanks::give_up(const std::exception& failure) {
  print_failure(rank(), count(), failure);
  world_->abort();
  end_process(failure);
}

}  // namespace sluice
