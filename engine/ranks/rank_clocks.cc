#include "engine/ranks/rank_clocks.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include <fmt/format.h>

#include <sluice/error.h>
#include "base/trace/trace_recorder.h"

namespace sluice {
namespace {

constexpr std::size_t kRounds = 16;  // the quickest counts, and the first ones are slow

}  // namespace

ClockOffset clock_offset(std::span<const ExchangeTimes> own, std::span<const ExchangeTimes> root) {
  SLUICE_CHECK(own.size() == root.size() && !own.empty(), "both ranks were in every exchange");
  std::int64_t least = INT64_MIN, most = INT64_MAX;
  for (std::size_t i = 0; i < own.size(); ++i) {
    least = std::max(least, static_cast<std::int64_t>(own[i].before_ns - root[i].after_ns));
    most = std::min(most, static_cast<std::int64_t>(own[i].after_ns - root[i].before_ns));
  }
  // Clocks that run at different rates contradict each other a little.
  if (least > most) std::swap(least, most);
  const std::int64_t width = most - least;
  return {.offset_ns = least + width / 2, .error_ns = static_cast<std::uint64_t>(width + 1) / 2};
}

bool any_rank_traces(Ranks& ranks) {
  RankRange range(trace_enabled() ? 1 : 0);
  ranks.all_reduce({}, std::span(&range, 1), "who traces");
  return range.most != 0;
}

std::string describe_clock(Ranks& ranks) {
  std::array<ExchangeTimes, kRounds> own, root;
  for (ExchangeTimes& times : own) {
    const std::byte nothing{};
    times.before_ns = steady_now_ns();
    (void)ranks.exchange(std::span(&nothing, 1), "clocks");
    times.after_ns = steady_now_ns();
  }
  root = own;
  ranks.broadcast(std::as_writable_bytes(std::span(root)), /*root=*/0, "clocks");
  const ClockOffset offset = ranks.rank() == 0 ? ClockOffset() : clock_offset(own, root);
  return fmt::format(R"({{"offset_ns": {}, "error_ns": {}}})", offset.offset_ns, offset.error_ns);
}

}  // namespace sluice
