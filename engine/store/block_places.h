// The places for blocks that pass through memory on their way to storage, from storage or to a
// file. Several blocks pass at once. Each place has a thread. The place's thread does all the work
// for the block in the place, and also waits there for transfers. So transfers of some blocks run
// beside the arithmetic of others, and the number of places bounds the memory.
//
// Thread rule: one thread calls the functions. The tasks run on the threads of their places,
// several at a time.
// Invariant: a place runs one task at a time. After the first task that has thrown, no task begins.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace sluice {

class BlockPlaces {
 public:
  // Requires: `count` is at least 1.
  // Fails with kUnsupported if no thread can be started.
  explicit BlockPlaces(std::uint32_t count);
  // Waits for the tasks under way.
  ~BlockPlaces();
  BlockPlaces(const BlockPlaces&) = delete;
  BlockPlaces& operator=(const BlockPlaces&) = delete;

  std::uint32_t count() const { return static_cast<std::uint32_t>(places_.size()); }
  // Returns when the place is free, so that the caller may use its memory.
  // Fails with the exception of the first task that has thrown.
  void await(std::uint32_t place);
  // The place's thread runs `task`. Requires: the place is free.
  void start(std::uint32_t place, std::function<void()> task);
  // Returns when all places are free.
  // Fails with the errors of await().
  void finish();

 private:
  void run(std::uint32_t place);
  void stop();

  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::function<void()>> places_;  // by place: its task; empty: the place is free
  std::exception_ptr failure_;
  bool is_stopping_ = false;

  std::vector<std::thread> threads_;  // last: they use everything above
};

}  // namespace sluice
