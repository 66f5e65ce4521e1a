// The launcher runs kernel bodies (gpu/math/kernel_elements.h) on the host device, one index after
// another. The results are the reference for a GPU's results. Thread rule: the same as for Device.
// The device must outlive the launcher.
#pragma once

#include <cstdint>

#include <sluice/host_device.h>
#include "gpu/math/kernel_elements.h"

namespace sluice {

// Runs body(i) for every i in [0, count).
template <class Body>
void run_elements(std::uint64_t count, const Body& body) {
  for (std::uint64_t i = 0; i < count; ++i) body(i);
}

// Runs body.store(i, sum) for every i in [0, count). `sum` is the sum of body.lane(i, 0..7). The
// order of the additions is ((0+4)+(2+6))+((1+5)+(3+7)).
template <class Body>
void run_leaves(std::uint64_t count, const Body& body) {
  for (std::uint64_t i = 0; i < count; ++i) {
    decltype(body.lane(i, 0u)) lanes[8];
    for (unsigned lane = 0; lane < 8; ++lane) lanes[lane] = body.lane(i, lane);
    body.store(i, ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
                      ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7])));
  }
}

class HostLauncher {
 public:
  explicit HostLauncher(HostDevice& device) : device_(device) {}

  // Enqueues run_elements() on `stream`.
  template <class Body>
  void elements(StreamId stream, std::uint64_t count, const Body& body) const {
    device_.launch(stream, [count, body] { run_elements(count, body); });
  }

  // Enqueues body(team, i) for every i in [0, count).
  template <class Body>
  void teams(StreamId stream, std::uint64_t count, const Body& body) const {
    device_.launch(stream, [count, body] {
      const SerialTeam team;
      for (std::uint64_t i = 0; i < count; ++i) body(team, i);
    });
  }

  // Does the same. On a GPU, the team is one warp.
  template <class Body>
  void warps(StreamId stream, std::uint64_t count, const Body& body) const {
    teams(stream, count, body);
  }

  // Enqueues run_leaves().
  template <class Body>
  void leaves(StreamId stream, std::uint64_t count, const Body& body) const {
    device_.launch(stream, [count, body] { run_leaves(count, body); });
  }

 private:
  HostDevice& device_;
};

}  // namespace sluice
