// The rules for a thread that waits for other ranks. The rules are the same for every connection.
// The rules say how long the thread polls until the first sleep, how the thread reports, and when
// the wait fails.
//
// Thread rule: any thread may call every function.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

// After this many polls without news, a thread sleeps between polls. The number is so large that a
// thread does not sleep during the short time in which a peer computes sums. The number is small
// enough that a waiting thread soon leaves the core to a peer with a longer computation.
inline constexpr std::uint32_t kLooksBeforeSleep = 4000;
inline constexpr std::chrono::microseconds kSleepBetweenLooks{50};

struct RankWait {
  double timeout_s = 120;
  // The name of the operation, and the name of the data that the operation moves.
  std::string_view kind;
  std::string_view subject;
  // A waiting thread calls this function about four times per second, with a text about the wait.
  // The pointer may be null, and the function may be empty.
  const std::function<void(const std::string& waiting)>* on_wait = nullptr;

  std::chrono::nanoseconds timeout() const;
  // The time between two calls of on_wait.
  std::chrono::nanoseconds interval() const;
  // A text such as "rank 2 has not answered rank 0 in all_gather of "h.3"". `missing_ranks` may
  // contain a rank more than once.
  std::string text(std::vector<std::uint32_t> missing_ranks, std::uint32_t own_rank) const;
  // Returns the text of the error that ends a wait after the timeout.
  std::string late_text(const std::string& waiting) const;
};

}  // namespace sluice
