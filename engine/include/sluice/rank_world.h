// The ranks that a launcher has started as processes of one training. The launcher is mpirun of
// Open MPI or MPICH, srun of Slurm, or torchrun. A RankWorld finds the launcher in the environment,
// connects the ranks, and makes the collectives for an engine. Without a launcher, the same program
// runs alone, as a single rank.
//
//   RankWorld world;
//   const auto device = make_host_device({.memory_bytes = 1 << 30});
//   const auto ranks = world.join(*device);  // null for one rank
//   Engine engine(world.shared(config), model, *device, ranks.get());
//
// examples/ranks is a complete program. examples/tensor_parallel and examples/pipeline divide the
// world into parts.
//
// Thread rule: one thread at a time.
// Failure: when a rank fails, the operations of the other ranks fail with kRanks, at the latest
// after the timeout. A rank that cannot go on calls abort() before it ends.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <sluice/collectives.h>
#include <sluice/config.h>
#include <sluice/cuda_device.h>
#include <sluice/export.h>
#include <sluice/host_device.h>
#include <sluice/norm_group.h>

namespace sluice {

// The kind of processor that the ranks compute on. MPI connects ranks on hosts, and NCCL connects
// ranks on GPUs.
enum class RankDevice : std::uint8_t { kHost, kGpu };

struct RankWorldOptions {
  RankDevice device = RankDevice::kHost;
  // The time for which a rank waits for others, and the order in which GPUs add gradients. Both
  // options come from Config::sharding.
  Config::Sharding sharding = {};
  // Called about four times a second, on any thread, while an operation waits for other processes.
  // `waiting` names the ranks and the operation.
  std::function<void(const std::string& waiting)> on_wait = {};
  // The path of libsluice_mpi.so. If this is empty, the library is found beside the program, beside
  // Sluice's library, where Sluice was installed, or where Sluice was built.
  std::string mpi_library = {};
};

class SLUICE_EXPORT RankWorld {
 public:
  // Starts MPI when the environment names several ranks. With torchrun and GPUs, MPI is not
  // started, because the ranks meet at the address that torchrun gives.
  // Fails with:
  // - kConfig: the environment contradicts itself, or ranks on hosts have sharding.reduction
  //   "nccl".
  // - kUnsupported: MPI or NCCL is missing, or the launcher does not start MPI.
  // - kRanks: another rank does not come in time.
  // After kRanks, the process has to end with _exit(), because MPI waits inside it.
  explicit RankWorld(const RankWorldOptions& options = {});
  // Closes the connections as leave() does, but does not throw.
  ~RankWorld();
  RankWorld(const RankWorld&) = delete;
  RankWorld& operator=(const RankWorld&) = delete;

  bool are_several() const { return count() > 1; }
  std::uint32_t rank() const;   // 0 without a launcher
  std::uint32_t count() const;  // 1 without a launcher
  // This rank's number among the ranks of its host, and the number of ranks of its host. If the
  // launcher gives no such numbers, the rank is 0 and the number of ranks is 1.
  std::uint32_t host_rank() const;
  std::uint32_t host_ranks() const;
  // The launcher's name: "Open MPI", "MPICH", "Slurm" or "torchrun"; empty without a launcher.
  const std::string& launcher() const;

  // Returns `config` for a rank that shares its host. A value of 0 for threads becomes this rank's
  // part of the cores, and sharding.group "node" becomes the number of ranks of the host.
  // Fails with kConfig if hosts have different numbers of ranks, or the launcher gives no such
  // numbers.
  Config shared(Config config) const;
  // The options of this rank's GPU: its number on the host, and memory that NCCL can share.
  CudaDeviceOptions gpu() const;

  // Makes the collectives over all ranks. The result is null if there is one rank. This object and
  // `device` must outlive the collectives.
  // Fails with:
  // - kInvalidArgument: this is a second call, or the device is of another kind than
  //   RankWorldOptions::device.
  // - kRanks: the GPUs do not meet.
  std::unique_ptr<Collectives> join(HostDevice& device);
  std::unique_ptr<Collectives> join(CudaDevice& device);

  // Closes the connections between the ranks when all ranks have called leave(). Call leave() last,
  // after the collectives have been destroyed.
  // Fails with kRanks if another rank does not come.
  void leave();
  // If MPI connects the ranks, the call ends every rank, and may end this process, too. Otherwise
  // the call returns, and the other ranks fail with kRanks when this process ends. Any thread may
  // call abort().
  void abort() noexcept;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

// Divides the ranks of `whole` into parts, for an application that splits its model by tensor or
// pipeline parallelism. For example, `whole` comes from RankWorld::join(). The ranks that give the
// same `color` form a part, in the order of their ranks. Returns the collectives over this rank's
// part. An engine that gets these collectives has the part's ranks. An application may also send
// its own messages with these collectives. Several calls divide the same ranks in several ways. All
// ranks of `whole` make the same calls in the same order. `device` is the device of `whole`; both
// must outlive the result. `sharding.group` counts the ranks of the part.
// Fails with kRanks if another rank does not come in time.
SLUICE_EXPORT std::unique_ptr<Collectives> split_ranks(Collectives& whole, Device& device,
                                                       std::uint32_t color);

// Makes the ranks of `members` a norm group (sluice/norm_group.h). While Step::finish() runs,
// nothing else may use `members`. `members` and `device`, the device of `members`, must outlive the
// group. The group takes 4 KiB of the device's memory, which Config::Memory does not count.
// Fails with kOutOfMemory if the device has no room.
SLUICE_EXPORT NormGroup norm_group_over(Collectives& members, Device& device,
                                        std::vector<TensorId> counted_elsewhere = {});

}  // namespace sluice
