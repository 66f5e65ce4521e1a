// What programs over the stand-in for the CUDA runtime have in place of kernels: their bodies run
// on the host, on the stand-in's streams.
#include "gpu/device_math_over.h"
#include "gpu/exchanged_sum.h"
#include "gpu/host_launch.h"
#include "tests/gpu/fake_cuda_runtime.h"

namespace sluice {
namespace {

class FakeLauncher {
 public:
  explicit FakeLauncher(CudaDevice& device) : device_(device) {}

  template <class Body>
  void elements(StreamId stream, std::uint64_t count, const Body& body) const {
    test::launch_fake_cuda(device_.native_stream(stream),
                           [count, body] { run_elements(count, body); });
  }
  template <class Body>
  void leaves(StreamId stream, std::uint64_t count, const Body& body) const {
    test::launch_fake_cuda(device_.native_stream(stream),
                           [count, body] { run_leaves(count, body); });
  }

 private:
  CudaDevice& device_;
};

}  // namespace

SumLauncher make_cuda_sum(CudaDevice& device) {
  return [launcher = FakeLauncher(device)](const ExchangedSum& sum, StreamId stream) {
    launch_sum(launcher, sum, stream);
  };
}

std::unique_ptr<DeviceMath> make_cuda_math(CudaDevice& device) {
  return std::make_unique<DeviceMathOver<FakeLauncher>>(FakeLauncher(device));
}

}  // namespace sluice
