// The ages of the transfers in flight, in ticks of the caller. A drive that works off a long queue
// is not stuck, so a transfer's age starts anew when it goes to the kernel and whenever its drive
// completes something. A transfer that a drive has lost while it continues with others is found by
// its whole time in the kernel, which may be kBusyFactor times as long. Pure.
//
// Thread rule: one thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "io/io_queue.h"

namespace sluice {

struct Transfer;

class TransferAges {
 public:
  static constexpr std::uint32_t kTicksOfTimeout = 16;
  static constexpr std::uint32_t kTicksOfSlow = kTicksOfTimeout / 4;
  static constexpr std::uint32_t kBusyFactor = 10;

  // The transfers, and their requests in the queue, stay in place until removed.
  void add(const Transfer& transfer, const IoRequest& request);
  void remove(const Transfer& transfer);  // it has ended; no effect if it is not there
  std::size_t count() const { return in_flight_.size(); }

  // A tick has passed. `on_slow`: called once for each transfer that has become slow.
  // Returns whether one is stuck.
  bool tick(const std::function<void(const Transfer&)>& on_slow);

  // Every transfer in flight with the ticks since it was added, the oldest first.
  struct Age {
    const Transfer* transfer = nullptr;
    std::uint32_t ticks = 0;
  };
  std::vector<Age> ages() const;

 private:
  struct Watched {
    const Transfer* transfer = nullptr;
    const IoRequest* request = nullptr;
    std::uint32_t ticks = 0;         // since it was added
    std::uint32_t kernel_ticks = 0;  // since it was seen to be with the kernel
    std::uint32_t silent_ticks = 0;  // since that, or since its drive has completed something
    bool is_noted = false;
  };

  std::vector<Watched> in_flight_;
  std::vector<bool> moved_;  // by drive: has completed something since the last tick
};

}  // namespace sluice
