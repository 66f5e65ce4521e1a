// Programs over the stand-in for the CUDA runtime have this in place of kernels: the bodies run on
// the host, on the stand-in's streams.
#include "gpu/cuda/device_math_choice.h"
#include "gpu/math/device_math_over.h"
#include "gpu/ranks/exchanged_sum.h"
#include "tests/gpu/cuda/fake_cuda_launcher.h"

namespace sluice {

SumLauncher make_cuda_sum(CudaDevice& device) {
  return [launcher = test::FakeCudaLauncher(device)](const ExchangedSum& sum, StreamId stream) {
    launch_sum(launcher, sum, stream);
  };
}

std::unique_ptr<DeviceMath> make_cuda_math(CudaDevice& device) {
  return std::make_unique<DeviceMathOver<test::FakeCudaLauncher>>(test::FakeCudaLauncher(device));
}

}  // namespace sluice
