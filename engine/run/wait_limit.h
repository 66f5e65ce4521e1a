// A wait limit ends an application's wait after a while. The application can then wait again. For
// example, the application can look for signals between the two waits. A thread may have both a
// WaitLimit and a LimitedWait. On such a thread, Scheduler::await() throws WaitEnded when the time
// limit is over. WaitEnded does not mean a failure. The thread no longer waits for the work, but
// the work goes on.
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
