// Sums over ranks on a GPU.
#include "gpu/cuda/cuda_launcher.h"
#include "gpu/ranks/exchanged_sum.h"

namespace sluice {

SumLauncher make_cuda_sum(CudaDevice& device) {
  return [launcher = CudaLauncher(device)](const ExchangedSum& sum, StreamId stream) {
    launch_sum(launcher, sum, stream);
  };
}

}  // namespace sluice
