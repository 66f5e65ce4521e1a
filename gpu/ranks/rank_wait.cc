#include "gpu/ranks/rank_wait.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace sluice {
namespace {

constexpr double kSayInterval_s = 0.25;

std::chrono::nanoseconds nanoseconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(seconds));
}

}  // namespace

std::chrono::nanoseconds RankWait::timeout() const {
  return nanoseconds(timeout_s);
}

std::chrono::nanoseconds RankWait::interval() const {
  return nanoseconds(std::min(timeout_s, kSayInterval_s));
}

std::string RankWait::text(std::vector<std::uint32_t> missing_ranks, std::uint32_t own_rank) const {
  std::ranges::sort(missing_ranks);
  missing_ranks.erase(std::ranges::unique(missing_ranks).begin(), missing_ranks.end());
  const bool is_one = missing_ranks.size() == 1;
  return fmt::format("{} {} {} not answered rank {} in {} of \"{}\"", is_one ? "rank" : "ranks",
                     fmt::join(missing_ranks, ", "), is_one ? "has" : "have", own_rank, kind,
                     subject);
}

std::string RankWait::late_text(const std::string& waiting) const {
  return fmt::format(
      "{} within {} s; a rank may have been killed or stopped; if it is only late, raise "
      "sharding.timeout",
      waiting, timeout_s);
}

}  // namespace sluice
