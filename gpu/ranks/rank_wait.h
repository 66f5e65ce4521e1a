// How a thread waits for other ranks, whatever connects them: how long it looks before it gives
// way and sleeps, what it says meanwhile, and when it gives up.
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

// Looks without news before a thread begins to sleep between them: long enough for a peer that
// computes nothing but sums, short enough not to take a core from one that computes.
inline constexpr std::uint32_t kLooksBeforeSleep = 4000;
inline constexpr std::chrono::microseconds kSleepBetweenLooks{50};

struct RankWait {
  double timeout_s = 120;
  // The operation, and what it moves.
  std::string_view kind;
  std::string_view subject;
  // Called about four times a second with what is waited for; may be empty.
  const std::function<void(const std::string& waiting)>* on_wait = nullptr;

  std::chrono::nanoseconds timeout() const;
  // From one call of on_wait to the next.
  std::chrono::nanoseconds interval() const;
  // "rank 2 has not answered rank 0 in all_gather of "h.3"". Ranks may repeat.
  std::string text(std::vector<std::uint32_t> missing_ranks, std::uint32_t own_rank) const;
  // The failure when the timeout has passed.
  std::string late_text(const std::string& waiting) const;
};

}  // namespace sluice
