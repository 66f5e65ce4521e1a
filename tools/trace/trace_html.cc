#include "tools/trace/trace_html.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <map>
#include <tuple>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/untrusted_json.h"
#include "tools/trace/trace_lanes.h"
#include "tools/trace/trace_steps.h"

namespace sluice {

extern const char* const kTracePageText;

namespace {

using nlohmann::ordered_json;

// Packed spans; the rest of a page takes some hundred KiB.
constexpr std::size_t kSpanBytesMax = 4'200'000;
constexpr std::size_t kBandwidthBins = 1200;
constexpr std::size_t kLatencyBuckets = 36;
constexpr std::size_t kWaitRowsMax = 500;
constexpr std::size_t kConfigBytesMax = 200'000;

double page_us(std::uint64_t duration_ns) {
  return static_cast<double>(duration_ns) * 1e-3;
}

// One rank's spans, at the resolution that the page has room for.
struct PackedRank {
  std::vector<TraceLane> lanes;
  std::vector<LaneSpan> resident;
  std::vector<LaneSpan> held;  // in lanes of the pass
};

template <class Function>
void for_each_list(PackedRank& rank, const Function& function) {
  for (TraceLane& lane : rank.lanes) function(lane.spans);
  function(rank.resident);
  function(rank.held);
}

// Joins spans until all ranks together fit. Returns the distance from which on spans can be told
// apart.
std::uint64_t thin_out(std::vector<PackedRank>& ranks) {
  std::uint64_t apart_us = 0;
  while (true) {
    std::size_t bytes = 0;
    for (PackedRank& rank : ranks)
      for_each_list(rank, [&](const auto& spans) { bytes += pack_spans(spans).size(); });
    if (bytes <= kSpanBytesMax) return apart_us;
    apart_us = apart_us == 0 ? 20 : apart_us * 2;
    for (PackedRank& rank : ranks)
      for_each_list(rank, [&](auto& spans) { join_spans(spans, apart_us); });
  }
}

ordered_json units_json(const TracedEngine& engine) {
  ordered_json units = ordered_json::array();
  for (std::size_t i = 0; i < engine.units.size(); ++i)
    units.push_back({{"name", engine.units[i].name},
                     {"tensors", engine.units[i].tensors},
                     {"tier", engine.parameter_tier[i]}});
  return units;
}

ordered_json steps_json(const TraceAnalysis& rank, std::uint64_t origin_ns) {
  ordered_json steps = ordered_json::array();
  const auto signed_us = [](std::int64_t duration_ns) {
    return static_cast<double>(duration_ns) * 1e-3;
  };
  for (const StepShare& step : rank.steps()) {
    steps.push_back({{"step", step.step},
                     {"begin", page_us(step.begin_ns - std::min(step.begin_ns, origin_ns))},
                     {"length", signed_us(step.total_ns())},
                     {"compute", signed_us(step.compute_ns)},
                     {"io", signed_us(step.exposed_io_ns)},
                     {"optimizer", signed_us(step.exposed_optimizer_ns)},
                     {"other", signed_us(step.other_ns)},
                     {"hidden", 100 * means_of({step}).hidden_share()}});
  }
  return steps;
}

// The times from an evaluation's first unit to its last, joined where no step begins between them.
// Their computation has no records.
ordered_json evaluations_json(const TraceAnalysis& rank, std::uint64_t origin_ns) {
  constexpr std::uint8_t kInference = 2;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> spans;
  for (const TraceRecord& record : rank.trace().records) {
    if (record.kind == TraceKind::kAcquire && record.detail == kInference &&
        record.begin_ns >= origin_ns)
      spans.emplace_back(record.begin_ns, record.end_ns);
  }
  std::ranges::sort(spans);
  const auto steps_before = [&](std::uint64_t time_ns) {
    return std::ranges::upper_bound(rank.steps(), time_ns, {}, &StepShare::begin_ns) -
           rank.steps().begin();
  };
  ordered_json list = ordered_json::array();
  std::ptrdiff_t last_steps = -1;
  for (const auto& [begin_ns, end_ns] : spans) {
    const std::ptrdiff_t steps = steps_before(begin_ns);
    const double begin_us = page_us(begin_ns - origin_ns), end_us = page_us(end_ns - origin_ns);
    if (steps != last_steps) list.push_back({{"begin", begin_us}, {"length", 0.0}});
    last_steps = steps;
    ordered_json& last = list.back();
    last["length"] = std::max(last["length"].get<double>(), end_us - last["begin"].get<double>());
  }
  return list;
}

// By cause, reason and unit, longest first; those of the optimizer pass, which are hidden as long
// as nothing waits for it, after those of computation.
ordered_json waits_json(const TraceAnalysis& rank, const TracedEngine& engine,
                        std::uint64_t origin_ns) {
  struct Row {
    StallGroup group;
    std::uint64_t longest_ns = 0;
    std::uint64_t longest_at_ns = 0;
    bool is_of_pass = false;
  };
  const std::vector<StepShare> steps = steady_steps(rank);
  const std::uint64_t steady_ns = steps.empty() ? 0 : steps.front().begin_ns;
  // Waits in the cut step of a killed run are of no step that ended.
  const bool is_cut = rank.steps().size() > 1 && rank.steps().back().is_open;
  const std::uint64_t end_ns = is_cut ? rank.steps().back().begin_ns : UINT64_MAX;
  std::map<std::tuple<StallCause, TraceReason, bool, std::uint32_t>, Row> rows;
  for (const Stall& stall : rank.stalls()) {
    if (stall.cause == StallCause::kEngine || stall.begin_ns < std::max(origin_ns, steady_ns) ||
        stall.begin_ns >= end_ns)
      continue;
    Row& row = rows[{stall.cause, stall.record->reason, stall.is_of_pass, stall.record->unit}];
    row.is_of_pass = stall.is_of_pass;
    row.group = {.cause = stall.cause,
                 .reason = stall.record->reason,
                 .spans = row.group.spans + 1,
                 .total_ns = row.group.total_ns + stall.duration_ns(),
                 .unit = stall.record->unit};
    if (stall.duration_ns() < row.longest_ns) continue;
    row.longest_ns = stall.duration_ns();
    row.longest_at_ns = stall.begin_ns - origin_ns;
  }
  std::vector<Row> sorted;
  for (auto& [key, row] : rows) sorted.push_back(row);
  std::ranges::sort(sorted, std::greater(),
                    [](const Row& row) { return std::pair(!row.is_of_pass, row.group.total_ns); });
  if (sorted.size() > kWaitRowsMax) sorted.resize(kWaitRowsMax);
  const double total_ns =
      std::max(1.0, 1e9 * means_of(steps).total_s * static_cast<double>(steps.size()));
  ordered_json list = ordered_json::array();
  for (const Row& row : sorted)
    list.push_back({{"cause", name_of(row.group.cause)},
                    {"who", row.is_of_pass ? "optimizer pass (hidden)" : "computation"},
                    {"reason", row.is_of_pass ? "" : name_of(row.group.reason)},
                    {"unit", row.group.unit == kTraceNone ? -1 : static_cast<int>(row.group.unit)},
                    {"count", row.group.spans},
                    {"total_us", page_us(row.group.total_ns)},
                    {"longest_us", page_us(row.longest_ns)},
                    {"longest_at", page_us(row.longest_at_ns)},
                    {"percent", 100 * static_cast<double>(row.group.total_ns) / total_ns},
                    {"advice", advice_for(row.group, rank, engine)}});
  return list;
}

// Bytes a second in each of some bins, each transfer spread over the time that it took.
ordered_json bandwidth_json(const TraceAnalysis& rank, std::uint64_t origin_ns,
                            std::uint64_t length_ns, const PeakRates& peaks) {
  std::array<std::vector<double>, 2> bins;
  for (auto& list : bins) list.resize(kBandwidthBins);
  const double bin_ns = std::max(1.0, static_cast<double>(length_ns) / kBandwidthBins);
  for (const TraceRecord& record : rank.trace().records) {
    if (record.kind > TraceKind::kWrite || record.started_ns < origin_ns) continue;
    const double begin = static_cast<double>(record.started_ns - origin_ns) / bin_ns;
    const double end =
        std::max(begin + 1e-6, static_cast<double>(record.moved_ns - origin_ns) / bin_ns);
    auto& list = bins[record.kind == TraceKind::kWrite ? 1 : 0];
    for (auto bin = static_cast<std::size_t>(begin); bin < kBandwidthBins; ++bin) {
      const auto at = static_cast<double>(bin);
      const double part = std::min(end, at + 1) - std::max(begin, at);
      if (part <= 0) break;
      list[bin] += static_cast<double>(record.size_bytes) * part / (end - begin) / bin_ns * 1e9;
    }
  }
  for (auto& list : bins)
    std::ranges::transform(list, list.begin(), [](double rate) { return std::round(rate); });
  return {{"bin_us", bin_ns * 1e-3},
          {"peak", std::max(peaks.read_bytes_per_second, peaks.write_bytes_per_second)},
          {"read", bins[0]},
          {"write", bins[1]}};
}

ordered_json flows_json(const TraceAnalysis& rank) {
  struct Counts {
    std::array<std::uint64_t, kLatencyBuckets> queue{}, device{};
  };
  std::map<FlowKey, Counts> flows;
  const auto bucket = [](std::uint64_t from_ns, std::uint64_t to_ns) {
    const std::uint64_t duration_ns = to_ns - std::min(from_ns, to_ns);
    return std::min<std::size_t>(std::bit_width(duration_ns | 1) - 1, kLatencyBuckets - 1);
  };
  for (const TraceRecord& record : rank.trace().records) {
    const std::optional<FlowKey> key = flow_of(record);
    if (!key) continue;
    ++flows[*key].queue[bucket(record.begin_ns, started_ns(record))];
    ++flows[*key].device[bucket(started_ns(record), moved_ns(record))];
  }
  constexpr std::array<const char*, 5> kColors{"read", "write", "up", "down", "rank"};
  ordered_json list = ordered_json::array();
  for (const auto& [key, counts] : flows) {
    const std::size_t color = std::min<std::size_t>(static_cast<std::size_t>(key.kind), 4);
    list.push_back({{"name", name_of(key)},
                    {"color", kColors[color]},
                    {"queue", counts.queue},
                    {"device", counts.device}});
  }
  return list;
}

ordered_json memory_json(const TracedEngine& engine) {
  ordered_json tiers = ordered_json::array();
  const auto add = [&](const char* tier, std::uint64_t bytes, std::uint64_t budget) {
    ordered_json pools = ordered_json::array();
    for (const TracedPool& pool : engine.pools) {
      if (pool.tier == tier) pools.push_back({{"name", pool.name}, {"bytes", pool.size_bytes}});
    }
    tiers.push_back({{"name", tier}, {"bytes", bytes}, {"budget", budget}, {"pools", pools}});
  };
  if (!engine.is_known) return tiers;
  add("device", engine.device_bytes, engine.device_budget_bytes);
  add("host", engine.host_bytes, engine.host_budget_bytes);
  add("nvme", engine.nvme_bytes, 0);
  return tiers;
}

// The settings, without the lists of units and tensors.
std::string config_text(const TraceFile& trace) {
  const auto section = trace.sections.find("engine");
  if (section == trace.sections.end()) return "not in this trace";
  auto document = parse_untrusted_json<ordered_json>(section->second);
  if (document.is_discarded() || !document.is_object()) return "damaged";
  for (const char* key : {"units", "forward_order", "backward_order"}) document.erase(key);
  return document.dump(2).substr(0, kConfigBytesMax);
}

ordered_json rank_json(const TraceAnalysis& rank, const PackedRank& packed, const PeakRates& peaks,
                       std::uint64_t origin_ns, std::uint64_t length_ns, std::uint64_t apart_us) {
  const TracedEngine engine = engine_of(rank.trace());
  ordered_json lanes = ordered_json::array();
  for (const TraceLane& lane : packed.lanes)
    lanes.push_back(
        {{"name", lane.name}, {"color", lane.color}, {"spans", pack_spans(lane.spans)}});
  const TraceFile& trace = rank.trace();
  return {
      {"rank", trace.rank},
      {"head", fmt::format("rank {} of {}, {} steps of {:.2f} ms (mean), {} records, {} lost{}",
                           trace.rank, trace.ranks, rank.steps().size(),
                           1e3 * means_of(steady_steps(rank)).total_s, trace.records.size(),
                           trace.lost, trace.is_complete ? "" : "; the run did not end its trace")},
      {"verdict", verdict_of(rank)},
      {"settings", setting_advice(rank, engine)},
      {"length_us", page_us(length_ns)},
      {"joined_us", apart_us},
      {"units", units_json(engine)},
      {"steps", steps_json(rank, origin_ns)},
      {"steady", {first_steady(rank), first_steady(rank) + steady_steps(rank).size()}},
      {"evaluations", evaluations_json(rank, origin_ns)},
      {"lanes", lanes},
      {"resident", pack_spans(packed.resident)},
      {"held", pack_spans(packed.held)},
      {"bandwidth", bandwidth_json(rank, origin_ns, length_ns, peaks)},
      {"flows", flows_json(rank)},
      {"memory", memory_json(engine)},
      {"waits", waits_json(rank, engine, origin_ns)},
      {"config", config_text(trace)}};
}

}  // namespace

std::string html_of(const std::vector<TraceAnalysis>& ranks, const PeakRates& peaks) {
  // From the first step on: what was before it is initialization.
  std::uint64_t origin_ns = UINT64_MAX, end_ns = 0;
  for (const TraceAnalysis& rank : ranks) {
    for (const TraceRecord& record : rank.trace().records) end_ns = std::max(end_ns, record.end_ns);
    if (!rank.steps().empty()) origin_ns = std::min(origin_ns, rank.steps().front().begin_ns);
  }
  if (origin_ns == UINT64_MAX) {
    for (const TraceAnalysis& rank : ranks)
      for (const TraceRecord& record : rank.trace().records)
        origin_ns = std::min(origin_ns, record.begin_ns);
  }
  const std::uint64_t length_ns = end_ns - std::min(origin_ns, end_ns);
  std::vector<PackedRank> packed;
  for (const TraceAnalysis& rank : ranks)
    packed.push_back({.lanes = lanes_of(rank, origin_ns),
                      .resident = spans_of(rank, TraceKind::kResident, origin_ns),
                      .held = spans_of(rank, TraceKind::kLane, origin_ns)});
  const std::uint64_t apart_us = thin_out(packed);
  ordered_json document = {{"subjects", lane_subjects()}, {"ranks", ordered_json::array()}};
  for (std::size_t i = 0; i < ranks.size(); ++i)
    document["ranks"].push_back(
        rank_json(ranks[i], packed[i], peaks, origin_ns, length_ns, apart_us));
  std::string data = document.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
  // No name may end the page's script, or begin a comment in it.
  for (std::size_t at = 0; (at = data.find('<', at)) != std::string::npos; at += 6)
    data.replace(at, 1, "\\u003c");
  std::string page = kTracePageText;
  constexpr std::string_view kPlace = "SLUICE_TRACE_DATA";
  return page.replace(page.find(kPlace), kPlace.size(), data);
}

}  // namespace sluice
