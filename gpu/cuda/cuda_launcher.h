// The launcher runs kernel bodies (gpu/math/kernel_elements.h) on a GPU. Only .cu files include
// this header. The header does not include the declarations of the CUDA runtime, because nvcc
// provides these declarations by itself. Thread rule: the same as for Device. The device must
// outlive the launcher. Invariants: a team adds in the same order on every GPU. A warp adds the
// values of its lanes in pairs. The distance between the lanes of a pair is 16 at first, and is
// halved in each step. Then the sums of the warps are added in the order of the warps. Kernels use
// 64-bit indices. In each step, a thread's index grows by the number of threads in the grid.
#pragma once

#include <algorithm>
#include <cstdint>

#include <sluice/cuda_device.h>
#include "gpu/cuda/cuda_enqueue.h"
#include "gpu/cuda/cuda_error.h"
#include "gpu/cuda/kernel_list.h"
#include "gpu/math/kernel_elements.h"

namespace sluice {

inline constexpr unsigned kTeamThreads = 256;
inline constexpr unsigned kWarpThreads = 32;
inline constexpr std::uint64_t kBlocksMax = 1 << 16;

// Combines the values of a warp's lanes, for the whole warp.
template <class Combine>
SLUICE_HOST_DEVICE float combine_lanes(float value, [[maybe_unused]] const Combine& combine) {
#ifdef __CUDA_ARCH__
  for (unsigned distance = 16; distance != 0; distance /= 2)
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, distance));
#endif
  return value;
}

// The threads of one block. The functions are for device code. On the host, the functions do
// nothing. The host versions exist only because the compiler also compiles kernel bodies as host
// functions.
class BlockTeam {
 public:
  SLUICE_HOST_DEVICE unsigned rank() const {
#ifdef __CUDA_ARCH__
    return threadIdx.x;
#else
    return 0;
#endif
  }
  SLUICE_HOST_DEVICE unsigned size() const {
    return kTeamThreads;
  }
  SLUICE_HOST_DEVICE float sum(float value) const {
    return reduce(value, [](float a, float b) { return a + b; });
  }
  SLUICE_HOST_DEVICE float max(float value) const {
    return reduce(value, [](float a, float b) { return a < b ? b : a; });
  }

 private:
  template <class Combine>
  SLUICE_HOST_DEVICE float reduce(float value, const Combine& combine) const {
    value = combine_lanes(value, combine);
#ifdef __CUDA_ARCH__
    constexpr unsigned kWarps = kTeamThreads / kWarpThreads;
    __shared__ float of_warp[kWarps];
    __syncthreads();  // every thread has read the previous call's of_warp
    if (threadIdx.x % kWarpThreads == 0) of_warp[threadIdx.x / kWarpThreads] = value;
    __syncthreads();
    value = of_warp[0];
    for (unsigned warp = 1; warp < kWarps; ++warp) value = combine(value, of_warp[warp]);
#endif
    return value;
  }
};

// The threads of one warp. The functions are for device code, as BlockTeam's are.
class WarpTeam {
 public:
  static constexpr unsigned kSize = kWarpThreads;
  SLUICE_HOST_DEVICE unsigned rank() const {
#ifdef __CUDA_ARCH__
    return threadIdx.x % kWarpThreads;
#else
    return 0;
#endif
  }
  SLUICE_HOST_DEVICE float max(float value) const {
    value = combine_lanes(value, [](float a, float b) { return a < b ? b : a; });
#ifdef __CUDA_ARCH__
    __syncwarp();  // shuffles do not order accesses to memory
#endif
    return value;
  }
};

template <class Body>
__global__ void __launch_bounds__(kTeamThreads) elements_kernel(std::uint64_t count, Body body) {
  const std::uint64_t stride = std::uint64_t{gridDim.x} * kTeamThreads;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * kTeamThreads + threadIdx.x; i < count;
       i += stride)
    body(i);
}

template <class Body>
__global__ void __launch_bounds__(kTeamThreads) teams_kernel(std::uint64_t count, Body body) {
  const BlockTeam team;
  for (std::uint64_t i = blockIdx.x; i < count; i += gridDim.x) body(team, i);
}

// Every warp is a team. All lanes of a warp have the same index.
template <class Body>
__global__ void __launch_bounds__(kTeamThreads) warps_kernel(std::uint64_t count, Body body) {
  constexpr unsigned kWarps = kTeamThreads / kWarpThreads;
  const WarpTeam team;
  const std::uint64_t stride = std::uint64_t{gridDim.x} * kWarps;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpThreads; i < count;
       i += stride)
    body(team, i);
}

// Eight threads compute each leaf. Every thread of a warp takes part in the shuffles.
template <class Body>
__global__ void __launch_bounds__(kTeamThreads) leaves_kernel(std::uint64_t count, Body body) {
  constexpr std::uint64_t kLeaves = kTeamThreads / 8;
  const unsigned lane = threadIdx.x % 8;
  for (std::uint64_t begin = blockIdx.x * kLeaves; begin < count; begin += gridDim.x * kLeaves) {
    const std::uint64_t leaf = begin + threadIdx.x / 8;
    decltype(body.lane(leaf, lane)) sum = leaf < count ? body.lane(leaf, lane) : 0;
    for (unsigned distance = 4; distance != 0; distance /= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (lane == 0 && leaf < count) body.store(leaf, sum);
  }
}

// The function launches `kernel` for zero indices, so that the launch does no work. `kernel` is one
// of the kernels above, instantiated for `Body`.
template <class Body>
void launch_nothing(const void* kernel, void* stream) {
  std::uint64_t count = 0;
  alignas(Body) unsigned char body[sizeof(Body)] = {};
  void* arguments[] = {&count, body};
  SLUICE_CUDA(cudaLaunchKernel(kernel, dim3(1), dim3(kTeamThreads), arguments, 0,
                               static_cast<cudaStream_t>(stream)));
}

// These structs put kernels on the list of load_kernels(). When the program starts, every kernel
// that the program's code can launch is put on the list.
template <class Body>
struct ListedElements {
  static void launch(void* stream) {
    launch_nothing<Body>(reinterpret_cast<const void*>(&elements_kernel<Body>), stream);
  }
  static inline const ListedKernel kernel{&launch};
};
template <class Body>
struct ListedTeams {
  static void launch(void* stream) {
    launch_nothing<Body>(reinterpret_cast<const void*>(&teams_kernel<Body>), stream);
  }
  static inline const ListedKernel kernel{&launch};
};
template <class Body>
struct ListedWarps {
  static void launch(void* stream) {
    launch_nothing<Body>(reinterpret_cast<const void*>(&warps_kernel<Body>), stream);
  }
  static inline const ListedKernel kernel{&launch};
};
template <class Body>
struct ListedLeaves {
  static void launch(void* stream) {
    launch_nothing<Body>(reinterpret_cast<const void*>(&leaves_kernel<Body>), stream);
  }
  static inline const ListedKernel kernel{&launch};
};

class CudaLauncher {
 public:
  explicit CudaLauncher(CudaDevice& device) : device_(device) {}

  // Enqueues body(i) for every i in [0, count) on `stream`. In this function and the next three
  // functions, a failed launch counts as a failure of the device (gpu/cuda/cuda_enqueue.h).
  template <class Body>
  void elements(StreamId stream, std::uint64_t count, const Body& body) const {
    (void)&ListedElements<Body>::kernel;
    if (count == 0) return;
    const std::uint64_t blocks = std::min((count + kTeamThreads - 1) / kTeamThreads, kBlocksMax);
    enqueue_kernel(device_, [&, native = native(stream)] {
      elements_kernel<<<static_cast<unsigned>(blocks), kTeamThreads, 0, native>>>(count, body);
    });
  }

  // Enqueues body(team, i) for every i in [0, count).
  template <class Body>
  void teams(StreamId stream, std::uint64_t count, const Body& body) const {
    (void)&ListedTeams<Body>::kernel;
    if (count == 0) return;
    const std::uint64_t blocks = std::min(count, kBlocksMax);
    enqueue_kernel(device_, [&, native = native(stream)] {
      teams_kernel<<<static_cast<unsigned>(blocks), kTeamThreads, 0, native>>>(count, body);
    });
  }

  // Does the same with teams of one warp, for bodies whose indices have work for no more threads.
  template <class Body>
  void warps(StreamId stream, std::uint64_t count, const Body& body) const {
    (void)&ListedWarps<Body>::kernel;
    if (count == 0) return;
    constexpr unsigned kWarps = kTeamThreads / kWarpThreads;
    const std::uint64_t blocks = std::min((count + kWarps - 1) / kWarps, kBlocksMax);
    enqueue_kernel(device_, [&, native = native(stream)] {
      warps_kernel<<<static_cast<unsigned>(blocks), kTeamThreads, 0, native>>>(count, body);
    });
  }

  // Enqueues body.store(i, sum) for every i in [0, count). `sum` is the sum of the eight values
  // body.lane(i, 0) to body.lane(i, 7). The order of the additions is ((0+4)+(2+6))+((1+5)+(3+7)).
  template <class Body>
  void leaves(StreamId stream, std::uint64_t count, const Body& body) const {
    (void)&ListedLeaves<Body>::kernel;
    if (count == 0) return;
    const std::uint64_t blocks =
        std::min((count + kTeamThreads / 8 - 1) / (kTeamThreads / 8), kBlocksMax);
    enqueue_kernel(device_, [&, native = native(stream)] {
      leaves_kernel<<<static_cast<unsigned>(blocks), kTeamThreads, 0, native>>>(count, body);
    });
  }

 private:
  cudaStream_t native(StreamId stream) const {
    return static_cast<cudaStream_t>(device_.native_stream(stream));
  }

  CudaDevice& device_;
};

}  // namespace sluice
