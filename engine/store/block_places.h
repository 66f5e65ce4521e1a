// This class provides places in memory for blocks that are on their way to storage, from storage or
// to a file. Several blocks are in memory at the same time, each in a place of its own. Each place
// has a thread. The thread of a place does all the work for the block in this place, and waits for
// the block's transfers. So some blocks are transferred while other blocks are processed. The
// number of places limits the memory.
//
// Thread rule: one thread calls the functions. Each task runs on the thread of its place. Tasks of
// different places run at the same time.
// Invariant: a place runs one task at a time. After a task has thrown, no further task begins.
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
  // The destructor waits for the tasks under way.
  ~BlockPlaces();
  BlockPlaces(const BlockPlaces&) = delete;
  BlockPlaces& operator=(const BlockPlaces&) = delete;

  std::uint32_t count() const { return static_cast<std::uint32_t>(places_.size()); }
  // The call returns when `place` is free. The caller may then use the memory of the place.
  // If tasks have thrown exceptions, the call throws the first one.
  void await(std::uint32_t place);
  // Lets the thread of `place` run `task`.
  // Requires: the place is free.
  void start(std::uint32_t place, std::function<void()> task);
  // The call returns when all places are free.
  // Fails in the same cases as await().
  void finish();

 private:
  // The thread of a place waits for a task, and the caller waits for the task's end. Each place has
  // its own `changed`, so a signal wakes up only the threads that wait for this place.
  struct Place {
    std::condition_variable changed;
    std::function<void()> task;
    bool is_free = true;
  };

  void run(Place& place);
  void stop();

  // Guarded by mutex_.
  std::mutex mutex_;
  std::vector<Place> places_;
  std::exception_ptr failure_;
  bool is_stopping_ = false;

  std::vector<std::thread> threads_;  // last: they use everything above
};

}  // namespace sluice
