// make_cuda_sum() of programs over the stand-in for the CUDA runtime: the kernels' bodies run as
// its kernels.
#include "gpu/exchanged_sum.h"
#include "tests/gpu/fake_cuda_runtime.h"

namespace sluice {
namespace {

class FakeLauncher {
 public:
  explicit FakeLauncher(CudaDevice& device) : device_(device) {}

  template <class Body>
  void elements(StreamId stream, std::uint64_t count, const Body& body) const {
    test::launch_fake_cuda(device_.native_stream(stream), [count, body] {
      for (std::uint64_t i = 0; i < count; ++i) body(i);
    });
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

}  // namespace sluice
