// With a wait limit, an application's wait ends after a while, and the application can then wait
// again. For example, the application can look for signals between the two waits. If a thread has a
// WaitLimit and a LimitedWait, Scheduler::await() throws WaitEnded on this thread when the time
// limit is over. WaitEnded does not mean a failure. The work for which the thread has waited goes
// on.
//
// Thread rule: each thread has its own limit.
#pragma once

#include <chrono>
#include <optional>

namespace sluice {

struct WaitEnded {};

// While this object lives, limited waits of this thread last at most `limit`.
class WaitLimit {
 public:
  explicit WaitLimit(std::chrono::milliseconds limit);
  ~WaitLimit();
  WaitLimit(const WaitLimit&) = delete;
  WaitLimit& operator=(const WaitLimit&) = delete;
};

// While this object lives, waits of this thread are limited. Without a LimitedWait, a wait has no
// limit, because the waiting operation could not be continued later.
class LimitedWait {
 public:
  LimitedWait();
  ~LimitedWait();
  LimitedWait(const LimitedWait&) = delete;
  LimitedWait& operator=(const LimitedWait&) = delete;
};

// The limit for a wait that begins now on this thread. The result is nullopt if there is no limit.
std::optional<std::chrono::milliseconds> wait_limit();

}  // namespace sluice
