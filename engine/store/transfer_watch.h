// The watch supervises the transfers in flight. The watch makes a note about each slow transfer. If
// a transfer never ends, the watch stops the engine (engine/store/transfer_ages.h has the rules).
// The age of a transfer is counted in ticks of the watch's own thread, not by the clock. So the age
// does not grow while the process is stopped, or while the machine is too busy to run the watch.
//
// Thread rule: any thread may call add() and remove(). A transfer and its request must not move in
// memory between add() and remove().
// Invariants: `on_stuck` is called at most once. There is at most one note about each transfer.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <sluice/error.h>
#include "engine/store/transfer_ages.h"

namespace sluice {

class TransferWatch {
 public:
  struct Hooks {
    // A function that names a transfer in a message. The watch's thread calls this function while
    // the transfer is in flight.
    std::function<std::string(const Transfer&)> describe;
    // The watch's thread calls this function when a transfer has not ended in time. The error has
    // the code kTimeout, and names the transfers in flight.
    std::function<void(const Error& error)> on_stuck;
  };

  // If `timeout_s` is 0, transfers are not watched, and no thread is started. A transfer counts as
  // slow after a quarter of `timeout_s`.
  TransferWatch(double timeout_s, Hooks hooks);
  ~TransferWatch();
  TransferWatch(const TransferWatch&) = delete;
  TransferWatch& operator=(const TransferWatch&) = delete;

  void add(const Transfer& transfer, const IoRequest& request);
  void remove(const Transfer& transfer);

  // Whether a transfer is stuck. The result becomes true just before on_stuck is called. After
  // that, it is possible that the transfers in flight never end.
  bool is_stuck() const { return is_stuck_.load(std::memory_order_acquire); }

  // Adds a line to the notes.
  void note(std::string line);
  // The lines since the last call: one for each transfer that has become slow, and those of note().
  // Beyond 64, lines are left out.
  std::vector<std::string> take_notes();

 private:
  void run();
  bool look();  // called with mutex_ held; returns whether a transfer is stuck
  std::string list() const;

  // Constant after construction.
  double timeout_s_;
  Hooks hooks_;

  std::atomic<bool> is_stuck_ = false;

  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable stop_wanted_;
  TransferAges in_flight_;
  std::vector<std::string> notes_;
  bool is_stopping_ = false;

  std::thread thread_;  // last: starts when everything else is ready
};

}  // namespace sluice
