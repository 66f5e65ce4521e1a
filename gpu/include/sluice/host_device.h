// The Device over host memory: a budget stands for the card's memory, a worker thread with a FIFO
// for each stream, a ticket for each event. Asynchronous like the real thing, so that a release
// before completion shows as a bug here too.
// Thread rule: as Device.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include <sluice/device.h>

namespace sluice {

struct HostDeviceOptions {
  std::uint64_t memory_bytes = 0;  // what allocate() may hand out in all
  // Bandwidth that each stream's copies are slowed down to, by sleeping; 0 = as fast as memory
  // goes. For tests and for emulating a bus. Bounds: 0, or at least 1 MB/s.
  std::uint64_t copy_bytes_per_second = 0;
  // What the device says of itself; true stands for a GPU, in tests of what an engine does with
  // one.
  bool has_own_memory = false;
};

class HostDevice : public Device {
 public:
  // Enqueues computation on `stream`. Unlike call_host, `work` may be long and may use the device's
  // memory freely. What it throws is kept and rethrown by the next synchronize(); work queued
  // behind it on any stream is skipped, its events complete.
  virtual void launch(StreamId stream, std::function<void()> work) = 0;

  // Emulated computation: `stream` is busy for `duration_ns` from the moment when this could start
  // (enqueued, and what it waited for done), and costs no CPU. Durations add up exactly, however
  // late each sleep wakes.
  virtual void occupy(StreamId stream, std::uint64_t duration_ns) = 0;
};

std::unique_ptr<HostDevice> make_host_device(const HostDeviceOptions& options);

}  // namespace sluice
