// Lets an application end a wait of its own thread after a while, and then wait again. In between,
// the application can look for signals, for example. Under a WaitLimit, a LimitedWait of
// Scheduler::await() throws WaitEnded when the time is over. Nothing has failed then, and the work
// that was waited for goes on.
//
// Thread rule: each thread has its own limit.
#pragma once

#include <chrono>
#include <optional>

namespace sluice {

struct WaitEnded {};

// While this object lives, limited waits of this thread last `limit` at most.
class WaitLimit {
 public:
  explicit WaitLimit(std::chrono::milliseconds limit);
  ~WaitLimit();
  WaitLimit(const WaitLimit&) = delete;
  WaitLimit& operator=(const WaitLimit&) = delete;
};

// While this object lives, waits of this thread are limited. All other waits last as long as they
// need, because the work that they wait for could not be continued.
class LimitedWait {
 public:
  LimitedWait();
  ~LimitedWait();
  LimitedWait(const LimitedWait&) = delete;
  LimitedWait& operator=(const LimitedWait&) = delete;
};

// The limit of a wait that begins now on this thread. The result is nullopt if there is no limit.
std::optional<std::chrono::milliseconds> wait_limit();

}  // namespace sluice
