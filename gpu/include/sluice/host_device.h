// The Device over host memory: a budget stands for the card's memory, a worker thread with a FIFO
// for each stream, a ticket for each event. It is asynchronous like a real GPU, so that a release
// before completion shows as a bug here too.
// Thread rule: as Device.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include <sluice/device.h>

namespace sluice {

struct HostDeviceOptions {
  std::uint64_t memory_bytes = 0;  // the limit of what allocate() hands out in all
  // Each stream's copies are slowed to this bandwidth by sleeping; 0 = at the speed of memory. For
  // tests and for emulating a bus. Bounds: 0, or at least 1 MB/s.
  std::uint64_t copy_bytes_per_second = 0;
  // The answer of Device::has_own_memory(). With true, tests see what an engine does with a
  // GPU.
  bool has_own_memory = false;
};

class HostDevice : public Device {
 public:
  // Enqueues computation on `stream`. Unlike a host function, `work` may be long and may use the
  // device's memory freely. An exception from it is kept and rethrown by the next synchronize();
  // later work on any stream is skipped, but its events complete.
  virtual void launch(StreamId stream, std::function<void()> work) = 0;

  // Emulates computation: `stream` is busy for `duration_ns` from the moment when the work could
  // start (it is enqueued, and everything it waits for is done), and costs no CPU. Durations add up
  // exactly, however late each sleep wakes.
  virtual void occupy(StreamId stream, std::uint64_t duration_ns) = 0;
};

std::unique_ptr<HostDevice> make_host_device(const HostDeviceOptions& options);

}  // namespace sluice
