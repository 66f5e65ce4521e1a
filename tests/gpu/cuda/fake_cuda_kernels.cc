// Programs over the stand-in for the CUDA runtime have this in place of kernels: the bodies run on
// the host, on the stand-in's streams.
#include <typeinfo>

#include "gpu/cuda/cuda_current_device.h"
#include "gpu/cuda/device_math_choice.h"
#include "gpu/cuda/kernel_list.h"
#include "gpu/math/device_math_over.h"
#include "gpu/math/host_launcher.h"
#include "gpu/ranks/exchanged_sum.h"
#include "tests/gpu/cuda/fake_cuda_runtime.h"

namespace sluice {
namespace {

// Bodies that are run in two ways would be two kernels.
template <class Body>
struct ListedFake {
  static void launch(void* stream) {
    test::launch_fake_cuda(
        stream, [] {}, typeid(Body).name());
  }
  static inline const ListedKernel kernel{&launch};
};

class FakeLauncher {
 public:
  explicit FakeLauncher(CudaDevice& device) : device_(device) {}

  template <class Body>
  void elements(StreamId stream, std::uint64_t count, const Body& body) const {
    (void)&ListedFake<Body>::kernel;
    const CudaCurrentDevice current(device_.ordinal());
    test::launch_fake_cuda(
        device_.native_stream(stream), [count, body] { run_elements(count, body); },
        typeid(Body).name());
  }
  template <class Body>
  void teams(StreamId stream, std::uint64_t count, const Body& body) const {
    (void)&ListedFake<Body>::kernel;
    const CudaCurrentDevice current(device_.ordinal());
    test::launch_fake_cuda(
        device_.native_stream(stream),
        [count, body] {
          const SerialTeam team;
          for (std::uint64_t i = 0; i < count; ++i) body(team, i);
        },
        typeid(Body).name());
  }
  template <class Body>
  void leaves(StreamId stream, std::uint64_t count, const Body& body) const {
    (void)&ListedFake<Body>::kernel;
    const CudaCurrentDevice current(device_.ordinal());
    test::launch_fake_cuda(
        device_.native_stream(stream), [count, body] { run_leaves(count, body); },
        typeid(Body).name());
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
