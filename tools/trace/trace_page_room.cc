#include "tools/trace/trace_page_room.h"

#include <algorithm>
#include <numeric>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace sluice {
namespace {

// These limits are for all ranks together. A step takes some 150 bytes, a row of waits 350, an
// evaluation 50. Units take up to a megabyte more, so spans have a megabyte at least.
constexpr std::size_t kStepsOfAll = 6000;
constexpr std::size_t kEvaluationsOfAll = 6000;
constexpr std::size_t kWaitRowsOfAll = 1500;
constexpr std::size_t kBinsOfAll = 24'000;
constexpr std::size_t kConfigBytesOfAll = 400'000;

}  // namespace

PageRoom page_room(std::size_t ranks) {
  const auto each = [&](std::size_t all, std::size_t most) { return std::min(most, all / ranks); };
  return {.steps = each(kStepsOfAll, 3000),
          .evaluations = each(kEvaluationsOfAll, 3000),
          .wait_rows = each(kWaitRowsOfAll, 500),
          .bandwidth_bins = std::max<std::size_t>(1, each(kBinsOfAll, 1200)),
          .config_bytes = each(kConfigBytesOfAll, 200'000)};
}

std::vector<std::size_t> even_places(std::size_t count, std::size_t count_max) {
  std::vector<std::size_t> places(std::min(count, count_max));
  for (std::size_t i = 0; i < places.size(); ++i)
    places[i] = places.size() == 1 ? 0 : i * (count - 1) / (places.size() - 1);
  return places;
}

std::vector<std::size_t> chosen_steps(const std::vector<StepShare>& steps, std::size_t count_max) {
  if (steps.size() <= count_max) return even_places(steps.size(), steps.size());
  const std::vector<std::size_t> even = even_places(steps.size(), count_max - count_max / 2);
  std::set<std::size_t> chosen(even.begin(), even.end());
  std::vector<std::size_t> longest(steps.size());
  std::iota(longest.begin(), longest.end(), std::size_t{0});
  std::ranges::stable_sort(longest, std::greater(),
                           [&](std::size_t place) { return steps[place].total_ns(); });
  for (const std::size_t place : longest) {
    if (chosen.size() >= count_max) break;
    chosen.insert(place);
  }
  return {chosen.begin(), chosen.end()};
}

nlohmann::ordered_json page_units(const TracedEngine& engine, std::size_t bytes_max,
                                  std::vector<std::string>& left_out) {
  const auto list = [&](bool has_tensors) {
    nlohmann::ordered_json units = nlohmann::ordered_json::array();
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < engine.units.size(); ++i) {
      nlohmann::ordered_json unit = {
          {"name", engine.units[i].name},
          {"tensors", has_tensors ? engine.units[i].tensors : std::vector<std::string>()},
          {"tier", engine.parameter_tier[i]}};
      bytes += page_text(unit).size() + 1;
      if (bytes > bytes_max) break;
      units.push_back(std::move(unit));
    }
    return units;
  };
  nlohmann::ordered_json units = list(true);
  if (units.size() == engine.units.size()) return units;
  left_out.emplace_back("units without the names of their tensors");
  units = list(false);
  if (units.size() != engine.units.size())
    left_out.push_back(fmt::format("the first {} of {} units", units.size(), engine.units.size()));
  return units;
}

std::string page_text(const nlohmann::ordered_json& value) {
  std::string text;
  // No name may end the page's script, or begin a comment in it.
  for (const char c : value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)) {
    if (c == '<')
      text += "\\u003c";
    else
      text += c;
  }
  return text;
}

}  // namespace sluice
