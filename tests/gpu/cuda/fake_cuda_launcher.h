// The stand-in for CudaLauncher. Kernel bodies run on the host, on the streams of the stand-in for
// the CUDA runtime. Thread rule: the same as for Device. The device must outlive the launcher.
#pragma once

#include <cstdint>
#include <typeinfo>

#include <sluice/cuda_device.h>
#include "gpu/cuda/cuda_enqueue.h"
#include "gpu/cuda/cuda_error.h"
#include "gpu/cuda/kernel_list.h"
#include "gpu/math/host_launcher.h"
#include "tests/gpu/cuda/fake_cuda_runtime.h"

namespace sluice::test {

// Each type of body counts as one kernel.
template <class Body>
struct ListedFake {
  static void launch(void* stream) {
    launch_fake_cuda(
        stream, [] {}, typeid(Body).name());
    SLUICE_CUDA(take_cuda_error());
  }
  static inline const ListedKernel kernel{&launch};
};

class FakeCudaLauncher {
 public:
  explicit FakeCudaLauncher(CudaDevice& device) : device_(device) {}

  template <class Body>
  void elements(StreamId stream, std::uint64_t count, const Body& body) const {
    launch<Body>(stream, [count, body] { run_elements(count, body); });
  }
  template <class Body>
  void teams(StreamId stream, std::uint64_t count, const Body& body) const {
    launch<Body>(stream, [count, body] {
      const SerialTeam team;
      for (std::uint64_t i = 0; i < count; ++i) body(team, i);
    });
  }
  template <class Body>
  void warps(StreamId stream, std::uint64_t count, const Body& body) const {
    teams(stream, count, body);
  }
  template <class Body>
  void leaves(StreamId stream, std::uint64_t count, const Body& body) const {
    launch<Body>(stream, [count, body] { run_leaves(count, body); });
  }

 private:
  template <class Body, class Work>
  void launch(StreamId stream, const Work& work) const {
    (void)&ListedFake<Body>::kernel;
    enqueue_kernel(device_, [&] {
      launch_fake_cuda(device_.native_stream(stream), work, typeid(Body).name());
    });
  }

  CudaDevice& device_;
};

}  // namespace sluice::test
