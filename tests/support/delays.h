// Random delays before every task of every flow: of the engine's own threads, of the device's
// streams, of storage. And a watchdog, for tests in which a hang is a result.
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

// As long as it lives, each task of the engine's threads (scheduler, worker) first waits up to
// `us_max`, mostly not at all. One at a time.
class TaskDelays {
 public:
  TaskDelays(std::uint64_t seed, std::uint32_t us_max);
  ~TaskDelays();
  TaskDelays(const TaskDelays&) = delete;
  TaskDelays& operator=(const TaskDelays&) = delete;
};

// A host device on which all work waits likewise. `inner` is its machinery.
std::unique_ptr<HostDevice> make_delayed_device(std::unique_ptr<HostDevice> inner,
                                                std::uint64_t seed, std::uint32_t us_max);

// Ends the program with a message unless it is destroyed in time.
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
