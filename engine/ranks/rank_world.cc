#include <sluice/rank_world.h>

#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/unique_fd.h"
#include "cpu_optim/rank_sum.h"
#include "engine/ranks/host_cores.h"
#include "engine/ranks/ranks.h"
#include "gpu/cuda/cuda_locality.h"
#include "gpu/ranks/launcher_environment.h"
#include "gpu/ranks/mpi_collectives.h"
#include "gpu/ranks/nccl_collectives.h"

namespace sluice {
namespace {

// Returns whether a program of this host listens at `port`.
bool is_taken(std::uint16_t port) {
  const UniqueFd probe(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int reuse = 1;  // of a port whose last connection has just ended
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_addr.s_addr = htonl(INADDR_ANY);
  any.sin_port = htons(port);
  return probe && ::setsockopt(probe.get(), SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof reuse) == 0 &&
         ::bind(probe.get(), reinterpret_cast<const sockaddr*>(&any), sizeof any) != 0 &&
         errno == EADDRINUSE;
}

// Returns where the ranks of torchrun meet: its own store listens at MASTER_PORT itself.
std::string meeting_point_of(const Launch& launch) {
  if (launch.master_port == std::numeric_limits<std::uint16_t>::max())
    throw Error(ErrorCode::kConfig,
                fmt::format("torchrun's MASTER_PORT is {}, the last one, but GPU ranks meet at the "
                            "port behind it; give torchrun a lower --master-port",
                            launch.master_port));
  const auto port = static_cast<std::uint16_t>(launch.master_port + 1);
  if (launch.rank == 0 && is_taken(port))
    throw Error(ErrorCode::kRanks,
                fmt::format("the ranks of torchrun meet at {}:{}, the port behind MASTER_PORT, but "
                            "another program listens there, such as torchrun for another job; "
                            "give this one another --master-port",
                            launch.master_address, port));
  return fmt::format("{}:{}", launch.master_address, port);
}

}  // namespace

struct RankWorld::Parts {
  explicit Parts(const RankWorldOptions& given)
      : options(given), launch(find_launch(std::getenv).value_or(Launch())) {}

  bool is_torchrun() const { return launch.launcher == "torchrun"; }
  void connect();
  void prepare_gpus() const;
  void start_mpi();
  std::uint32_t ranks_of_node(std::string_view setting, std::string_view key) const;
  void require_first_join(RankDevice device);
  NcclId share_id();

  const RankWorldOptions options;
  const Launch launch;
  bool has_joined = false;
  std::unique_ptr<MpiWorld> mpi;
  // The device for messages between hosts, by which GPU ranks tell each other where to meet.
  std::unique_ptr<HostDevice> meeting_device;
};

void RankWorld::Parts::connect() {
  if (options.device == RankDevice::kHost) require_host_reduction(options.sharding);
  if (options.device == RankDevice::kGpu) prepare_gpus();
  if (!is_torchrun()) {
    start_mpi();
  } else if (options.device == RankDevice::kHost) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("torchrun has started rank {} of {}, but ranks on hosts are connected "
                            "by MPI; start with mpirun -n {}, or set run.device to \"cuda\"",
                            launch.rank, launch.rank_count, launch.rank_count));
  }
}

// Before MPI's thread runs, and before the first call of the CUDA runtime.
void RankWorld::Parts::prepare_gpus() const {
  prepare_nccl_environment();
  if (is_torchrun()) {
    const std::string meeting_point = meeting_point_of(launch);
    (void)::setenv("NCCL_COMM_ID", meeting_point.c_str(), /*overwrite=*/1);
  }
  if (const std::string why = why_no_nccl(); !why.empty())
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("run.device is \"cuda\" and there are {} ranks, which NCCL connects: {}",
                    launch.rank_count, why));
}

void RankWorld::Parts::start_mpi() {
  mpi = std::make_unique<MpiWorld>(
      HostCollectivesOptions{
          .timeout_s = options.sharding.timeout_s, .sum = sum_in_order, .on_wait = options.on_wait},
      options.mpi_library);
  if (mpi->rank() != launch.rank || mpi->rank_count() != launch.rank_count)
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("{} says that this is rank {} of {}, MPI ({}) that it is rank {} of {}; "
                    "start with the mpirun of that MPI, or srun --mpi=pmix",
                    launch.launcher, launch.rank, launch.rank_count, mpi->version(), mpi->rank(),
                    mpi->rank_count()));
}

// Ranks of a host have to follow each other, or a group would span hosts.
std::uint32_t RankWorld::Parts::ranks_of_node(std::string_view setting,
                                              std::string_view key) const {
  const std::uint32_t local = launch.local_rank_count;
  if (!launch.knows_local_ranks)
    throw Error(ErrorCode::kConfig,
                fmt::format("{}, but {} does not tell how many ranks a host has; set {} to that "
                            "number",
                            setting, launch.launcher, key));
  if (launch.rank_count % local != 0 || launch.rank % local != launch.local_rank)
    throw Error(ErrorCode::kConfig,
                fmt::format("{}, but rank {} of {} is number {} of {} on its host; start equally "
                            "many ranks on every host, one host after the other (mpirun --map-by "
                            "slot)",
                            setting, launch.rank, launch.rank_count, launch.local_rank, local));
  return local;
}

void RankWorld::Parts::require_first_join(RankDevice device) {
  const auto name = [](RankDevice of) { return of == RankDevice::kGpu ? "GPU" : "host"; };
  if (device != options.device)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("join: rank {} of {} gives a {} device, but "
                            "RankWorldOptions::device says {}; set it to what the ranks compute on",
                            launch.rank, launch.rank_count, name(device), name(options.device)));
  if (std::exchange(has_joined, true))
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("join: rank {} of {} has joined already; a RankWorld makes one object "
                            "of collectives, which an engine divides",
                            launch.rank, launch.rank_count));
}

// Under torchrun NCCL_COMM_ID makes every rank's the same.
NcclId RankWorld::Parts::share_id() {
  NcclId id{};
  if (launch.rank == 0 || mpi == nullptr) id = make_nccl_id();
  if (mpi == nullptr) return id;
  meeting_device = make_host_device({.memory_bytes = 1_MiB});
  const std::unique_ptr<Collectives> hosts = mpi->join(*meeting_device);
  const Stream stream(*meeting_device, "meeting");
  const DeviceBuffer data(*meeting_device, id.size(), "NCCL's id");
  std::memcpy(data.data(), id.data(), id.size());
  hosts->broadcast({.data = data.data(), .size_bytes = id.size(), .subject = "NCCL's id"},
                   stream.id());
  meeting_device->synchronize(stream.id());
  std::memcpy(id.data(), data.data(), id.size());
  return id;
}

RankWorld::RankWorld(const RankWorldOptions& options) : parts_(std::make_unique<Parts>(options)) {
  if (!are_several()) return;
  Config config;  // the engine checks its own only when the ranks have met
  config.sharding = options.sharding;
  validate(config);
  parts_->connect();
}

RankWorld::~RankWorld() = default;

std::uint32_t RankWorld::rank() const {
  return parts_->launch.rank;
}
std::uint32_t RankWorld::count() const {
  return parts_->launch.rank_count;
}
std::uint32_t RankWorld::host_rank() const {
  return parts_->launch.local_rank;
}
std::uint32_t RankWorld::host_ranks() const {
  return std::max(1u, parts_->launch.local_rank_count);
}
const std::string& RankWorld::launcher() const {
  return parts_->launch.launcher;
}

Config RankWorld::shared(Config config) const {
  if (!are_several()) return config;
  if (config.sharding.group_is_node) {
    config.sharding.group_ranks =
        parts_->ranks_of_node("sharding.group is \"node\"", "sharding.group");
    config.sharding.group_is_node = false;
  }
  if (config.sharding.reduction == RankReduction::kNodes && config.sharding.node_ranks == 0)
    config.sharding.node_ranks =
        parts_->ranks_of_node("sharding.reduction is \"nodes\"", "sharding.node_ranks");
  if (config.threads == 0)
    config.threads = own_share_of_cores(parts_->launch.rank_variable, host_ranks());
  return config;
}

// A launcher may show each rank all GPUs of its host, or one.
CudaDeviceOptions RankWorld::gpu() const {
  if (!are_several() || parts_->options.device != RankDevice::kGpu) return {};
  const int gpus = std::max(1, cuda_device_count());
  return {.ordinal = static_cast<int>(host_rank()) % gpus, .memory_source = nccl_memory_source()};
}

std::unique_ptr<Collectives> RankWorld::join(HostDevice& device) {
  parts_->require_first_join(RankDevice::kHost);
  return are_several() ? parts_->mpi->join(device) : nullptr;
}

std::unique_ptr<Collectives> RankWorld::join(CudaDevice& device) {
  parts_->require_first_join(RankDevice::kGpu);
  if (!are_several()) return nullptr;
  // Before the engine makes its pools and starts its threads.
  (void)stay_near_gpu(device.ordinal(), host_ranks());
  const Config::Sharding& sharding = parts_->options.sharding;
  return make_nccl_collectives(
      device,
      {.timeout_s = sharding.timeout_s,
       .reduction = sharding.reduction == RankReduction::kNccl ? NcclReduction::kPlain
                                                               : NcclReduction::kExact},
      parts_->share_id(), rank(), count());
}

void RankWorld::leave() {
  if (parts_->mpi != nullptr) parts_->mpi->leave();
}

void RankWorld::abort() noexcept {
  if (parts_->mpi != nullptr) parts_->mpi->abort();
}

}  // namespace sluice
