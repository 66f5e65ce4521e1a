// DeviceMath's kernel bodies, run on the host device.
#include "gpu/math/device_math.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <deque>
#include <semaphore>
#include <thread>

#include "gpu/math/device_math_over.h"
#include "gpu/math/host_launcher.h"
#include "tests/gpu/math/device_code_cases.h"

namespace sluice {
namespace {

// The lanes of a warp as threads that run in turns. A lane runs until its next max(), and then the
// next lane runs. So what a lane writes behind a max() is there before the next lanes go on.
class Warp {
 public:
  static constexpr unsigned kSize = 32;

  Warp() {
    for (unsigned lane = 0; lane < kSize; ++lane) turns_.emplace_back(lane == 0 ? 1 : 0);
  }

  // Returns once all lanes have called it and it is this lane's turn again.
  float max(unsigned lane, unsigned call, float value) {
    std::array<float, kSize>& values =
        values_[call % 2];  // later lanes have yet to read the others
    values[lane] = value;
    pass(lane);
    await(lane);
    return *std::max_element(values.begin(), values.end());
  }
  void await(unsigned lane) { turns_[lane].acquire(); }
  void pass(unsigned lane) { turns_[(lane + 1) % kSize].release(); }

 private:
  std::deque<std::binary_semaphore> turns_;
  std::array<std::array<float, kSize>, 2> values_{};
};

class LaneTeam {
 public:
  static constexpr unsigned kSize = Warp::kSize;
  LaneTeam(Warp& warp, unsigned lane) : warp_(warp), lane_(lane) {}
  unsigned rank() const { return lane_; }
  float max(float value) const { return warp_.max(lane_, calls_++, value); }

 private:
  Warp& warp_;
  const unsigned lane_;
  mutable unsigned calls_ = 0;
};

// As HostLauncher, but with a thread for each lane of a warp.
class LaneLauncher {
 public:
  explicit LaneLauncher(HostDevice& device) : device_(device), serial_(device) {}

  template <class Body>
  void elements(StreamId stream, std::uint64_t count, const Body& body) const {
    serial_.elements(stream, count, body);
  }
  template <class Body>
  void leaves(StreamId stream, std::uint64_t count, const Body& body) const {
    serial_.leaves(stream, count, body);
  }
  template <class Body>
  void warps(StreamId stream, std::uint64_t count, const Body& body) const {
    device_.launch(stream, [count, body] {
      Warp warp;
      std::vector<std::jthread> lanes;
      for (unsigned lane = 0; lane < Warp::kSize; ++lane) {
        lanes.emplace_back([&, lane] {
          const LaneTeam team(warp, lane);
          warp.await(lane);
          for (std::uint64_t i = 0; i < count; ++i) body(team, i);
          warp.pass(lane);
        });
      }
    });
  }

 private:
  HostDevice& device_;
  HostLauncher serial_;
};

template <class Launcher>
MathMachine make_host_machine() {
  auto device = make_host_device({.memory_bytes = 64_MiB});
  auto math = std::make_unique<DeviceMathOver<Launcher>>(Launcher(*device));
  return MathMachine{std::move(device), std::move(math)};
}

INSTANTIATE_TEST_SUITE_P(Host, DeviceMathTest,
                         testing::Values(MathMachineFactory{"host", [] { return std::string(); },
                                                            &make_host_machine<HostLauncher>},
                                         MathMachineFactory{"lanes", [] { return std::string(); },
                                                            &make_host_machine<LaneLauncher>}),
                         math_machine_name);

}  // namespace
}  // namespace sluice
