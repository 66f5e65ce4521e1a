// The part of HostExchange that waits for other ranks.
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <sluice/error.h>
#include "gpu/ranks/host_exchange.h"

namespace sluice {
namespace {

using std::chrono::steady_clock;

// Polls before a rank begins to yield to other threads between them: a few microseconds, in which a
// peer copies some 50 KiB. Such a poll is much cheaper than one into MPI.
constexpr std::uint32_t kLooksBeforeYield = 100;
// One in this many yielding polls checks the time and failures elsewhere.
constexpr std::uint32_t kLooksForTime = 16;

void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

HostExchange::Missing HostExchange::missing_ranks(Counter counter, std::uint64_t step) const {
  std::vector<std::uint32_t> late;
  std::vector<std::uint32_t> failed;
  for (std::uint32_t peer = 0; peer < group_.count(); ++peer) {
    if (peer == group_.rank || has_reached(peer, counter, step)) continue;
    const bool has_failed = signals_[peer]->failed.load(std::memory_order_acquire) != 0;
    if (has_failed) require_same_operation(peer);
    (has_failed ? failed : late).push_back(group_.members[peer]);
  }
  const bool have_failed = late.empty() && !failed.empty();
  return {.ranks = std::move(late.empty() ? failed : late), .have_failed = have_failed};
}

// A rank that has failed does not come. It is named at the second look, so that a rank that the
// failed one has waited for, too, can still be named by the timeout that both share.
void HostExchange::await_step(std::uint32_t peer, Counter counter, std::uint64_t step) {
  for (std::uint32_t looks = 0; looks < kLooksBeforeYield; ++looks) {
    if (has_reached(peer, counter, step)) return;
    pause_core();
  }
  const auto begin = steady_clock::now();
  auto pause = begin + how_.interval();
  bool had_failed = false;
  for (std::uint32_t looks = 0; !has_reached(peer, counter, step); ++looks) {
    if (looks < kLooksBeforeSleep) {
      std::this_thread::yield();
      if (looks % kLooksForTime != 0) continue;
    } else {
      std::this_thread::sleep_for(kSleepBetweenLooks);
    }
    failure_.throw_if_set();
    const auto now = steady_clock::now();
    if (now < pause) continue;
    pause = now + how_.interval();
    Missing missing = missing_ranks(counter, step);
    if (missing.ranks.empty()) continue;
    const bool is_one = missing.ranks.size() == 1;
    const std::string waiting = how_.text(std::move(missing.ranks), group_.members[group_.rank]);
    if (std::exchange(had_failed, missing.have_failed) && missing.have_failed)
      throw Error(ErrorCode::kRanks,
                  fmt::format("{}, because {}", waiting,
                              is_one ? "it has failed; its own message says why"
                                     : "they have failed; their own messages say why"));
    if (now - begin >= how_.timeout()) throw Error(ErrorCode::kRanks, how_.late_text(waiting));
    if (options_.on_wait) options_.on_wait(waiting);
  }
}

}  // namespace sluice
