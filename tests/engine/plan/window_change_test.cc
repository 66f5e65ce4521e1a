// Schedules that change again and again, with one lease and with several. Each unit is found whole
// and no lease is overwritten. A use is refused only where the leases leave no room for it.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>
#include <vector>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/plan/step_plans.h"
#include "tests/support/campaign.h"

namespace sluice::test {
namespace {

constexpr std::uint64_t kChangePage = 4096;

enum class WindowSize { kLeast, kAnyOrder };

// The pages of a window, as the fetches and uses of its plans leave them.
class ChangingWindow {
 public:
  ChangingWindow(std::uint64_t seed, WindowSize size) : random_(seed), seed_(seed) {
    leases_ = 1 + static_cast<std::uint32_t>(random_() % 5);
    bytes_.resize(1 + random_() % 12);
    for (std::uint64_t& bytes : bytes_)
      bytes =
          random_() % 5 == 0 ? 0 : 1 + random_() % ((random_() % 3 == 0 ? 24 : 6) * kChangePage);
    for (int use = 0; use < 40; ++use) plan_.schedule.push_back({.unit = any_unit()});
    const std::uint64_t least = least_window_bytes(plan_.schedule, bytes_, leases_);
    const std::uint64_t any_order = any_order_window_bytes(bytes_, leases_);
    window_ = std::max(least, size == WindowSize::kAnyOrder ? any_order : 0);
    plan_.window = plan_window(plan_.schedule, bytes_, window_, leases_);
    owner_.assign(window_ / kChangePage, kNobody);
    is_sure_ = size == WindowSize::kAnyOrder || leases_ == 1;
  }

  // Changed schedules that fit the window, and those of them that were not planned to their ends.
  int plannable() const { return plannable_; }
  int cut() const { return cut_; }

  void run() {
    while (acquired_ < plan_.schedule.size() && !testing::Test::HasFailure()) {
      if (acquired_ >= leases_) release(acquired_ - leases_);
      while (fetched_ <= acquired_) fetch(fetched_++, /*is_whole=*/true);
      expect_whole(acquired_++);
      while (may_fetch(fetched_) && random_() % 3 != 0) fetch(fetched_++, /*is_whole=*/true);
      while (random_() % 2 == 0 && release_any()) {
      }
      if (random_() % 6 == 0 && plan_.schedule.size() < 100) change();
    }
  }

 private:
  static constexpr std::uint32_t kNobody = UINT32_MAX;

  UnitId any_unit() { return UnitId{static_cast<std::uint32_t>(random_() % bytes_.size())}; }

  void release(std::uint32_t use) { std::erase(open_, use); }
  bool release_any() {
    if (!open_.empty()) open_.erase(open_.begin() + static_cast<int>(random_() % open_.size()));
    return !open_.empty();
  }
  bool is_leased(std::uint32_t unit) const {
    return std::ranges::any_of(
        open_, [&](std::uint32_t use) { return index_of(plan_.schedule[use].unit) == unit; });
  }

  // The bytes that the fetch for the use overwrites have been used.
  bool may_fetch(std::uint32_t use) const {
    return use < plan_.schedule.size() &&
           std::ranges::all_of(plan_.window.uses[use].evicted_uses, [&](std::uint32_t evicted) {
             return evicted < acquired_ && !is_leased(index_of(plan_.schedule[evicted].unit));
           });
  }

  std::span<std::uint32_t> pages_of(std::uint32_t use) {
    return std::span(owner_).subspan(
        plan_.window.uses[use].offset_bytes / kChangePage,
        (bytes_[index_of(plan_.schedule[use].unit)] + kChangePage - 1) / kChangePage);
  }

  void fetch(std::uint32_t use, bool is_whole) {
    if (!plan_.window.uses[use].fetch) return;
    ASSERT_TRUE(may_fetch(use)) << "use " << use << ", seed " << seed_;
    const std::uint32_t unit = index_of(plan_.schedule[use].unit);
    ASSERT_FALSE(is_leased(unit)) << "use " << use << " moves a leased unit, seed " << seed_;
    std::ranges::replace(owner_, unit, kNobody);
    for (const std::uint32_t& page : pages_of(use)) {
      const std::uint32_t victim = page;
      if (victim == kNobody) continue;
      ASSERT_FALSE(is_leased(victim)) << "use " << use << ", seed " << seed_;
      std::ranges::replace(owner_, victim, kNobody);
    }
    if (is_whole) std::ranges::fill(pages_of(use), unit);
  }

  void expect_whole(std::uint32_t use) {
    for (const std::uint32_t page : pages_of(use))
      ASSERT_EQ(page, index_of(plan_.schedule[use].unit)) << "use " << use << ", seed " << seed_;
    open_.push_back(use);
  }

  bool has_room_for(std::uint32_t unit) const {
    if (is_leased(unit) || bytes_[unit] == 0) return true;
    const std::uint64_t needed = (bytes_[unit] + kChangePage - 1) / kChangePage;
    std::uint64_t gap = 0;
    for (const std::uint32_t owner : owner_) {
      gap = owner != kNobody && is_leased(owner) ? 0 : gap + 1;
      if (gap == needed) return true;
    }
    return false;
  }

  void change() {
    if (acquired_ >= leases_) release(acquired_ - leases_);
    WindowProgress progress{.acquired = acquired_, .fetched = fetched_};
    progress.is_partly_fetched =
        may_fetch(fetched_) && plan_.window.uses[fetched_].fetch && random_() % 2 == 0;
    if (progress.is_partly_fetched) fetch(fetched_, /*is_whole=*/false);
    for (std::uint32_t use = acquired_ - std::min(acquired_, leases_ - 1); use < acquired_; ++use)
      if (const std::uint32_t unit = index_of(plan_.schedule[use].unit); !is_leased(unit))
        progress.unleased.push_back(unit);
    const UnitId unit = plan_.schedule[random_() % plan_.schedule.size()].unit;
    const bool has_room = has_room_for(index_of(unit));
    const Schedule whole =
        changed_schedule(plan_.schedule, acquired_, unit, Pass::kForward, leases_);
    try {
      plan_ = changed_plan(plan_, progress, unit, Pass::kForward,
                           {.unit_bytes = bytes_, .window_bytes = window_, .leases = leases_});
    } catch (const Error& error) {
      EXPECT_FALSE(is_sure_ || has_room) << error.what() << ", seed " << seed_;
      if (progress.is_partly_fetched) fetch(fetched_++, /*is_whole=*/true);
      return;
    }
    fetched_ = acquired_;
    if (least_window_bytes(whole, bytes_, leases_) <= window_) {
      ++plannable_;
      cut_ += plan_.schedule.size() < whole.size() ? 1 : 0;
    }
  }

  std::mt19937_64 random_;
  std::uint64_t seed_;
  std::uint32_t leases_ = 1;
  std::vector<std::uint64_t> bytes_;  // by unit
  std::uint64_t window_ = 0;
  bool is_sure_ = false;  // no change may be refused
  StepPlan plan_;
  std::vector<std::uint32_t> owner_;  // by page: the unit whose bytes are there, whole
  std::vector<std::uint32_t> open_;   // uses whose leases have not ended
  std::uint32_t acquired_ = 0;
  std::uint32_t fetched_ = 0;
  int plannable_ = 0;
  int cut_ = 0;
};

TEST(WindowChange, FindsItsUnitsWholeAndIsRefusedOnlyWhereLeasesLeaveNoRoom) {
  int plannable = 0;
  int cut = 0;
  for (const std::uint64_t seed : seeds_of(campaign(2000))) {
    ChangingWindow window(seed, WindowSize::kLeast);
    window.run();
    if (testing::Test::HasFailure()) return;
    plannable += window.plannable();
    cut += window.cut();
  }
  EXPECT_LE(cut * 100, plannable) << "nearly all are planned to their ends";
}

TEST(WindowChange, IsNeverRefusedInAWindowForAnyOrder) {
  for (const std::uint64_t seed : seeds_of(campaign(2000))) {
    ChangingWindow(seed, WindowSize::kAnyOrder).run();
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace sluice::test
