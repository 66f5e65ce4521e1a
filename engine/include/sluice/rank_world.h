// The ranks that a launcher has started as processes of one training run. The launcher is mpirun of
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
// ranks into parts.
//
// Thread rule: one thread at a time.
// Failure: when a rank fails, the operations of the other ranks fail with kRanks. These operations
// fail when the timeout ends, or earlier. If a rank cannot continue, the rank calls abort() before
// the destructors of its step, its streams and its engine, because these wait for the other ranks.
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

// The kind of processor on which the ranks compute. MPI connects ranks on hosts, and NCCL connects
// ranks on GPUs.
enum class RankDevice : std::uint8_t { kHost, kGpu };

struct RankWorldOptions {
  RankDevice device = RankDevice::kHost;
  // These options give the time that a rank waits for other ranks, and the order in which GPUs add
  // gradients. The application takes these options from Config::sharding.
  Config::Sharding sharding = {};
  // This function is called about four times per second, on any thread, while an operation waits
  // for other processes. `waiting` names the missing ranks and the operation.
  std::function<void(const std::string& waiting)> on_wait = {};
  // The path of libsluice_mpi.so. If the path is empty, Sluice searches for the library in four
  // folders: the program's folder, the folder of Sluice's library, the install folder and the build
  // folder.
  std::string mpi_library = {};
};

class SLUICE_EXPORT RankWorld {
 public:
  // Starts MPI if the environment names several ranks. With torchrun and GPUs, MPI is not started,
  // because the ranks connect through the address that torchrun gives.
  // Fails with:
  // - kConfig: the environment contradicts itself, or the ranks compute on hosts but
  //   sharding.reduction is "nccl".
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
  // host_rank() is this rank's number among the ranks of the same host. host_ranks() is the number
  // of these ranks. If the launcher gives no such numbers, host_rank() is 0 and host_ranks() is 1.
  std::uint32_t host_rank() const;
  std::uint32_t host_ranks() const;
  // The launcher's name: "Open MPI", "MPICH", "Slurm" or "torchrun"; empty without a launcher.
  const std::string& launcher() const;

  // Returns `config`, adapted to a rank that shares its host with other ranks. If Config::threads
  // is 0, Config::threads of the result is this rank's share of the host's cores. The share is an
  // equal part of the cores that the launcher may use, but not more than this process may use. If
  // sharding.group is "node", the ranks of a host form a group in the result.
  // Fails with kConfig if hosts have different numbers of ranks, or if the launcher gives no such
  // numbers.
  Config shared(Config config) const;
  // Returns the options of this rank's GPU: the GPU's number on the host, and memory that NCCL can
  // share.
  CudaDeviceOptions gpu() const;

  // Makes the collectives over all ranks. The result is null if there is one rank. This object and
  // `device` must outlive the collectives.
  // Fails with:
  // - kInvalidArgument: join() has already been called, or the device is of another kind than
  //   RankWorldOptions::device.
  // - kRanks: the GPUs of the ranks cannot be connected in time.
  std::unique_ptr<Collectives> join(HostDevice& device);
  std::unique_ptr<Collectives> join(CudaDevice& device);

  // Waits until all ranks have called leave(), and then closes the connections between the ranks.
  // Call leave() at the end, after the collectives have been destroyed.
  // Fails with kRanks if another rank does not call leave().
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
// pipeline parallelism. `whole` may be the result of RankWorld::join(). All ranks that pass the
// same `color` form a part. The ranks of a part keep their order. Returns the collectives over this
// rank's part. An engine that gets these collectives trains with the ranks of this part. An
// application may also send its own messages with these collectives. An application can make
// several calls to divide the same ranks in several ways. All ranks of `whole` make the same calls
// in the same order. `device` is the device of `whole`. `whole` and `device` must outlive the
// result. If an engine trains with the ranks of a part, the engine's sharding.group counts only the
// ranks of this part.
// Fails with kRanks if another rank does not come in time.
SLUICE_EXPORT std::unique_ptr<Collectives> split_ranks(Collectives& whole, Device& device,
                                                       std::uint32_t color);

// Forms a norm group from the ranks of `members` (sluice/norm_group.h). While Step::finish() runs,
// nothing else may use `members`. `device` is the device of `members`. `members` and `device` must
// outlive the group. The group takes 4 KiB of the device's memory. Config::Memory does not count
// these 4 KiB.
// Fails with kOutOfMemory if the device has no room.
SLUICE_EXPORT NormGroup norm_group_over(Collectives& members, Device& device,
                                        std::vector<TensorId> counted_elsewhere = {});

}  // namespace sluice
