// A Device that uses host memory. A budget limits this memory. The budget stands for the size of a
// GPU's memory. Each stream is a worker thread with a FIFO queue, and each event is a ticket. The
// host device is asynchronous like a real GPU. Code that releases memory before the end of the work
// therefore fails on the host device, as on a GPU. Thread rule: the same as for Device.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include <sluice/device.h>
#include <sluice/export.h>

namespace sluice {

struct HostDeviceOptions {
  std::uint64_t memory_bytes = 0;  // the limit for the sum of all allocations
  // The bandwidth of each stream's copies. The value 0 stands for the speed of memory. The device
  // slows copies down to this bandwidth by sleeping. The option is for tests and for emulating a
  // bus. The value is 0 or at least 1 MB/s.
  std::uint64_t copy_bytes_per_second = 0;
  // The result of Device::has_own_memory(). If a test sets this option to true, the engine treats
  // the host device as a GPU.
  bool has_own_memory = false;
  // If a stream has no other work, the calling thread runs the stream's notices. If a stream has no
  // other work, the calling thread also makes the copies and fills that have at most this many
  // bytes. The call need not wake the stream's thread, but the calling thread moves the bytes
  // itself. The option is meant for applications that compute on the calling thread. If the value
  // is 0, the stream's thread does all work, so that tests detect a missing wait. The option has no
  // effect if copy_bytes_per_second is set.
  std::uint64_t at_once_bytes_max = 0;
};

// A core copies about this many bytes in the time that the wake-up of another thread takes.
inline constexpr std::uint64_t kAtOnceBytes = 32 << 10;

class SLUICE_EXPORT HostDevice : public Device {
 public:
  // Enqueues computation on `stream`. Unlike a host function, `work` may be long and may use the
  // device's memory freely. On every thread, `work` begins in the floating-point environment that
  // rounds to nearest and keeps denormal numbers. If `work` changes this environment, the change
  // lasts until `work` returns. An exception from `work` is kept and rethrown by the next
  // synchronize(). Later work on any stream is skipped, but events still complete.
  virtual void launch(StreamId stream, std::function<void()> work) = 0;

  // Emulates computation without using the CPU. `stream` is busy for `duration_ns`. The duration
  // begins as soon as the call has been made and all earlier work on the stream has ended. The
  // durations add up exactly, even if a thread wakes up late from its sleep.
  virtual void occupy(StreamId stream, std::uint64_t duration_ns) = 0;
};

SLUICE_EXPORT std::unique_ptr<HostDevice> make_host_device(const HostDeviceOptions& options);

}  // namespace sluice
