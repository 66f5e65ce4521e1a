// plan_placement(): decides which attempts are made under given budgets and, where nothing fits,
// which budgets would suffice.
#include <algorithm>
#include <functional>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/plan/placement_planner.h"

namespace sluice {
namespace {

constexpr std::uint64_t kPlenty = std::uint64_t{1} << 62;

// The least multiple of 1 KiB that works; every larger one works, too. `fails` is known not to
// work, and `guess` is probably close.
std::uint64_t smallest_that(const std::function<bool(std::uint64_t)>& works, std::uint64_t fails,
                            std::uint64_t guess) {
  std::uint64_t low = fails / 1_KiB;  // does not work
  std::uint64_t high = std::max(div_ceil(guess, 1_KiB), low + 1);
  while (!works(high * 1_KiB)) {
    SLUICE_CHECK(high < kPlenty / 1_KiB, "some size works");
    low = high;
    high *= 2;
  }
  if (high - low > 1 && !works((high - 1) * 1_KiB)) return high * 1_KiB;
  while (high - low > 1) {
    const std::uint64_t middle = low + (high - low) / 2;
    (works(middle * 1_KiB) ? high : low) = middle;
  }
  return high * 1_KiB;
}

class BudgetSearch {
 public:
  BudgetSearch(const Layout& layout, const ModelSpec& model, const Config::Placement& choices,
               const PassNeeds& pass)
      : planner_(layout, model, choices, pass), thrifts_(thrifts_of(choices, pass)) {}

  // Puts as much on the device as host memory allows.
  std::optional<Placement> plan(const Budgets& budgets,
                                PlacementShortage* shortage = nullptr) const {
    for (const PlacementThrift& thrift : thrifts_) {
      PlacementPlanner planner = planner_;
      const std::optional<PlacementShortage> found = planner.attempt(budgets, thrift);
      if (!found) return planner.take();
      const bool is_first = &thrift == &thrifts_.front();
      if (shortage != nullptr && (is_first || found->needed_bytes < shortage->needed_bytes))
        *shortage = *found;
      if (found->tier == Tier::kDevice) break;  // too small for every attempt
    }
    return std::nullopt;
  }

  [[noreturn]] void refuse(const Budgets& budgets, const PlacementShortage& shortage) const {
    Budgets enough = budgets;
    if (shortage.tier == Tier::kDevice) {
      // Where no device spares the host enough: the least device beside a large enough host.
      const bool host_works =
          plan({.device_bytes = kPlenty, .host_bytes = budgets.host_bytes}).has_value();
      enough.device_bytes = smallest_that(
          [&](std::uint64_t bytes) {
            return works(
                {.device_bytes = bytes, .host_bytes = host_works ? budgets.host_bytes : kPlenty});
          },
          budgets.device_bytes, shortage.needed_bytes);
    }
    PlacementShortage rest = shortage;
    if (!plan(enough, &rest))
      enough.host_bytes = smallest_that(
          [&](std::uint64_t bytes) {
            return works({.device_bytes = enough.device_bytes, .host_bytes = bytes});
          },
          budgets.host_bytes, rest.needed_bytes);
    fail(budgets, enough);
  }

 private:
  // The variants that can make a difference, the one with most on the device first.
  static std::vector<PlacementThrift> thrifts_of(const Config::Placement& choices,
                                                 const PassNeeds& pass) {
    const bool may_leave_records = pass.fills_device && choices.optimizer == TierChoice::kAuto;
    std::vector<PlacementThrift> thrifts;
    for (const bool gradients : {false, true}) {
      if (gradients && choices.gradients != TierChoice::kAuto) continue;
      for (const PlacementThrift homes : {PlacementThrift{}, PlacementThrift{.records = true},
                                          PlacementThrift{.parameters = true}}) {
        if (homes.records && !may_leave_records) continue;
        for (const bool buffers : {false, true}) {
          thrifts.push_back(homes);
          thrifts.back().buffers = buffers;
          thrifts.back().gradients = gradients;
        }
      }
    }
    return thrifts;
  }

  bool works(const Budgets& budgets) const { return plan(budgets).has_value(); }

  // Names the budgets to raise, and lists the pools that they have to hold.
  [[noreturn]] void fail(const Budgets& budgets, const Budgets& enough) const {
    const std::optional<Placement> placement = plan(enough);
    SLUICE_CHECK(placement.has_value(), "the budgets named work");
    const bool device_is_short = budgets.device_bytes < enough.device_bytes;
    const bool host_is_short = budgets.host_bytes < enough.host_bytes;
    const auto named = [](std::uint64_t bytes) {
      return fmt::format("\"{}KiB\" ({})", bytes / 1_KiB, format_bytes(bytes));
    };
    std::string message =
        fmt::format("memory.{} = {} is too small; the smallest that works is {}",
                    device_is_short ? "device" : "host",
                    format_bytes(device_is_short ? budgets.device_bytes : budgets.host_bytes),
                    named(device_is_short ? enough.device_bytes : enough.host_bytes));
    if (device_is_short && host_is_short)
      message += fmt::format(", with memory.host = {} instead of {}", named(enough.host_bytes),
                             format_bytes(budgets.host_bytes));
    message += ':';
    for (const Pool& pool : placement->pools()) {
      const bool is_listed = (pool.tier == Tier::kDevice && device_is_short) ||
                             (pool.tier == Tier::kHost && host_is_short);
      if (is_listed && pool.size_bytes != 0)
        message += fmt::format("\n  {:<24} {:>10}  {}", pool.name, format_bytes(pool.size_bytes),
                               pool.reason);
    }
    throw Error(ErrorCode::kOutOfMemory, message);
  }

  const PlacementPlanner planner_;  // before any attempt
  const std::vector<PlacementThrift> thrifts_;
};

}  // namespace

Placement plan_placement(const Layout& layout, const ModelSpec& model,
                         const Config::Placement& choices, const Budgets& budgets,
                         const PassNeeds& pass) {
  const BudgetSearch search(layout, model, choices, pass);
  PlacementShortage shortage;
  if (std::optional<Placement> placement = search.plan(budgets, &shortage))
    return *std::move(placement);
  search.refuse(budgets, shortage);
}

}  // namespace sluice
