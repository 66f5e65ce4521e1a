#include "tools/trace/trace_ranks.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

namespace sluice {
namespace {

// Each rank has the collectives of one unit and sort in a step in the same order.
using Sequence = std::tuple<std::uint64_t, std::uint32_t, std::uint8_t>;  // step, unit, detail

std::map<Sequence, std::vector<std::uint64_t>> begins_of(const TraceAnalysis& rank) {
  std::set<std::uint64_t> steps;
  for (const StepShare& step : rank.steps()) steps.insert(step.step);
  std::map<Sequence, std::vector<std::uint64_t>> begins;
  for (const TraceRecord& record : rank.trace().records) {
    if (record.kind == TraceKind::kCollective && steps.contains(record.step))
      begins[{record.step, record.unit, record.detail}].push_back(record.begin_ns);
  }
  for (auto& [sequence, list] : begins) std::ranges::sort(list);
  return begins;
}

}  // namespace

RankLags rank_lags(const std::vector<TraceAnalysis>& ranks) {
  RankLags lags;
  std::vector<std::map<Sequence, std::vector<std::uint64_t>>> begins;
  for (const TraceAnalysis& rank : ranks) {
    lags.ranks.push_back({.rank = rank.trace().rank});
    begins.push_back(begins_of(rank));
  }
  if (ranks.size() < 2) return lags;
  for (const auto& entry : begins.front()) {
    const Sequence& sequence = entry.first;
    const std::vector<std::uint64_t>& own = entry.second;
    // Where a trace has lost one, it is not known which belong together.
    const bool is_whole = std::ranges::all_of(begins, [&](const auto& of) {
      const auto found = of.find(sequence);
      return found != of.end() && found->second.size() == own.size();
    });
    if (!is_whole) continue;
    lags.collectives += own.size();
    for (std::size_t i = 0; i < own.size(); ++i) {
      std::vector<std::pair<std::uint64_t, std::size_t>> order;  // begin, rank
      for (std::size_t rank = 0; rank < ranks.size(); ++rank)
        order.emplace_back(begins[rank].at(sequence)[i], rank);
      std::ranges::sort(order);
      RankLag& last = lags.ranks[order.back().second];
      ++last.last;
      last.late_ns += order.back().first - order[order.size() - 2].first;
    }
  }
  return lags;
}

}  // namespace sluice
