// The ages of the transfers in flight. The caller counts time in ticks. A drive that works on a
// long queue is not stuck. So the age of a transfer starts again at zero when the transfer goes to
// the kernel. The age also starts again whenever the transfer's drive completes a request. A drive
// may also lose one transfer and continue with other transfers. A lost transfer is recognized by
// its total time in the kernel. The limit for the total time in the kernel is kBusyFactor times the
// limit for the age. The class is pure.
//
// Thread rule: one thread at a time may use the object.
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

  // The transfer and its request must not be moved before remove() is called.
  void add(const Transfer& transfer, const IoRequest& request);
  void remove(const Transfer& transfer);  // the transfer has ended; no effect if it was not added
  std::size_t count() const { return in_flight_.size(); }

  // Must be called once per tick. Calls `on_slow` for each transfer that has become slow, but at
  // most once per transfer. Returns whether a transfer is stuck.
  bool tick(const std::function<void(const Transfer&)>& on_slow);

  struct Age {
    const Transfer* transfer = nullptr;
    std::uint32_t ticks = 0;
  };
  // The result has one Age for every transfer in flight. The oldest transfer comes first. `ticks`
  // is the number of ticks since add().
  std::vector<Age> ages() const;

 private:
  struct Watched {
    const Transfer* transfer = nullptr;
    const IoRequest* request = nullptr;
    std::uint32_t ticks = 0;         // since it was added
    std::uint32_t kernel_ticks = 0;  // since it was first seen in the kernel
    std::uint32_t silent_ticks = 0;  // since then, or since the drive's last completion
    bool is_noted = false;
  };

  std::vector<Watched> in_flight_;
  std::vector<bool> moved_;  // by drive: has completed something since the last tick
};

}  // namespace sluice
