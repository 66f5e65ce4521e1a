// This header adds random delays to the tasks of three parts: the engine's threads, the device's
// streams, and storage. There is also a watchdog for tests that may hang.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include <sluice/host_device.h>

namespace sluice::test {

// While this object exists, tasks of the engine's threads (scheduler, worker) are delayed by at
// most `us_max`. Most tasks are not delayed. Only one such object may exist at a time.
class TaskDelays {
 public:
  TaskDelays(std::uint64_t seed, std::uint32_t us_max);
  ~TaskDelays();
  TaskDelays(const TaskDelays&) = delete;
  TaskDelays& operator=(const TaskDelays&) = delete;
};

// Returns a host device that delays its work in the same way as TaskDelays. Apart from the delays,
// the device passes each call on to `inner`.
std::unique_ptr<HostDevice> make_delayed_device(std::unique_ptr<HostDevice> inner,
                                                std::uint64_t seed, std::uint32_t us_max);

// The watchdog ends the program with a message, unless the watchdog is destroyed in time.
class Watchdog {
 public:
  Watchdog(std::chrono::seconds limit, std::string message);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  bool has_ended_ = false;
  std::thread thread_;
};

}  // namespace sluice::test
