// Runs kernel bodies (gpu/kernel_elements.h) on the host device, index after index: the reference
// for what a GPU computes with them. Thread rule: as Device. The device must outlive it.
#pragma once

#include <cstdint>

#include "gpu/host_device.h"
#include "gpu/kernel_elements.h"

namespace sluice {

class HostLauncher {
 public:
  explicit HostLauncher(HostDevice& device) : device_(device) {}

  // body(i) for every i in [0, count), enqueued on `stream`.
  template <class Body>
  void elements(StreamId stream, std::uint64_t count, const Body& body) const {
    device_.launch(stream, [count, body] {
      for (std::uint64_t i = 0; i < count; ++i) body(i);
    });
  }

  // body(team, i) for every i in [0, count).
  template <class Body>
  void teams(StreamId stream, std::uint64_t count, const Body& body) const {
    device_.launch(stream, [count, body] {
      const SerialTeam team;
      for (std::uint64_t i = 0; i < count; ++i) body(team, i);
    });
  }

 private:
  HostDevice& device_;
};

}  // namespace sluice
