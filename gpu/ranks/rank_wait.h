// How a thread waits for other ranks, over any connection: how long it polls before it sleeps, what
// it reports meanwhile, and when it gives up.
//
// Thread rule: every function from any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

// Polls without news before a thread begins to sleep between them: long enough for a peer that only
// computes sums, short enough not to take a core from one that computes.
inline constexpr std::uint32_t kLooksBeforeSleep = 4000;
inline constexpr std::chrono::microseconds kSleepBetweenLooks{50};

struct RankWait {
  double timeout_s = 120;
  // The operation, and the data that it moves.
  std::string_view kind;
  std::string_view subject;
  // Called about four times a second with a text about the wait; may be empty.
  const std::function<void(const std::string& waiting)>* on_wait = nullptr;

  std::chrono::nanoseconds timeout() const;
  // The time from one call of on_wait to the next.
  std::chrono::nanoseconds interval() const;
  // "rank 2 has not answered rank 0 in all_gather of "h.3"". Ranks may repeat.
  std::string text(std::vector<std::uint32_t> missing_ranks, std::uint32_t own_rank) const;
  // The error text after the timeout has passed.
  std::string late_text(const std::string& waiting) const;
};

}  // namespace sluice
