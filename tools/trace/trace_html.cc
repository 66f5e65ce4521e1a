#include "tools/trace/trace_html.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <map>
#include <tuple>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include "base/untrusted_json.h"
#include "tools/trace/trace_lanes.h"
#include "tools/trace/trace_page_room.h"
#include "tools/trace/trace_steps.h"

namespace sluice {

extern const char* const kTracePageText;

namespace {

using nlohmann::ordered_json;

constexpr std::size_t kUnitBytesMax = 1'000'000;
constexpr std::size_t kSpanBytesMin = 100'000;  // less shows nothing
constexpr std::size_t kLatencyBuckets = 36;

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

// Joins spans until those of all ranks have `bytes_max` bytes, packed. Returns the distance from
// which on spans can be told apart.
std::uint64_t thin_out(std::vector<PackedRank>& ranks, std::size_t bytes_max) {
  std::uint64_t apart_us = 0;
  while (true) {
    std::size_t bytes = 0;
    for (PackedRank& rank : ranks)
      for_each_list(rank, [&](const auto& spans) { bytes += pack_spans(spans).size(); });
    if (bytes <= bytes_max) return apart_us;
    apart_us = apart_us == 0 ? 20 : apart_us * 2;
    for (PackedRank& rank : ranks)
      for_each_list(rank, [&](auto& spans) { join_spans(spans, apart_us); });
  }
}

// Notes what the page leaves out, if that is more than nothing.
void note_left_out(std::size_t shown, std::size_t count, const char* of,
                   std::vector<std::string>& left_out) {
  if (shown < count) left_out.push_back(fmt::format("{} of {} {}", shown, count, of));
}

ordered_json steps_json(const TraceAnalysis& rank, std::uint64_t origin_ns, const PageRoom& room,
                        std::vector<std::string>& left_out) {
  ordered_json steps = ordered_json::array();
  const auto signed_us = [](std::int64_t duration_ns) {
    return static_cast<double>(duration_ns) * 1e-3;
  };
  for (const std::size_t place : chosen_steps(rank.steps(), room.steps)) {
    const StepShare& step = rank.steps()[place];
    steps.push_back({{"step", step.step},
                     {"begin", page_us(step.begin_ns - std::min(step.begin_ns, origin_ns))},
                     {"length", signed_us(step.total_ns())},
                     {"compute", signed_us(step.compute_ns)},
                     {"io", signed_us(step.exposed_io_ns)},
                     {"optimizer", signed_us(step.exposed_optimizer_ns)},
                     {"other", signed_us(step.other_ns)},
                     {"hidden", 100 * means_of({step}).hidden_share()}});
  }
  note_left_out(steps.size(), rank.steps().size(),
                "steps (the longest, and others at equal distances)", left_out);
  return steps;
}

// The parts of the mean step, in percent.
ordered_json split_json(const StepMeans& means) {
  const auto percent = [&](double part_s) { return 100 * means.share_of_step(part_s); };
  return {{"compute", percent(means.compute_s)},
          {"io", percent(means.exposed_io_s)},
          {"optimizer", percent(means.exposed_optimizer_s)},
          {"other", percent(means.other_s)}};
}

// The times from an evaluation's first unit to its last, joined where no step begins between them.
// Their computation has no records.
ordered_json evaluations_json(const TraceAnalysis& rank, std::uint64_t origin_ns,
                              const PageRoom& room, std::vector<std::string>& left_out) {
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
  ordered_json shown = ordered_json::array();
  for (const std::size_t place : even_places(list.size(), room.evaluations))
    shown.push_back(list[place]);
  note_left_out(shown.size(), list.size(), "evaluations", left_out);
  return shown;
}

// By cause, reason and unit, longest first; those of the optimizer pass, which are hidden as long
// as nothing waits for it, after those of computation.
ordered_json waits_json(const TraceAnalysis& rank, const TracedEngine& engine,
                        std::uint64_t origin_ns, const PageRoom& room,
                        std::vector<std::string>& left_out) {
  struct Row {
    StallGroup group;
    std::uint64_t longest_ns = 0;
    std::uint64_t longest_at_ns = 0;
    bool is_of_pass = false;
  };
  const std::vector<StepShare> steps = steady_steps(rank);
  const std::uint64_t steady_ns = steps.empty() ? 0 : steps.front().begin_ns;
  // Waits in the cut step of a killed run are of no step that ended.
  const bool is_cut = ended_steps(rank) < rank.steps().size();
  const std::uint64_t end_ns = is_cut ? rank.steps().back().begin_ns : UINT64_MAX;
  std::map<std::tuple<StallCause, TraceReason, bool, std::uint32_t>, Row> rows;
  for (const Stall& stall : rank.stalls()) {
    const bool is_between = !stall.is_of_pass && !place_of(*stall.record, rank.steps());
    if (stall.cause == StallCause::kEngine || stall.begin_ns < std::max(origin_ns, steady_ns) ||
        stall.begin_ns >= end_ns || is_between)
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
  const std::size_t shown = std::min(sorted.size(), room.wait_rows);
  note_left_out(shown, sorted.size(), "rows of waits (the longest)", left_out);
  sorted.resize(shown);
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

// The most of `rates` in a bin that has a part of a step.
double most_in_steps(const std::vector<double>& rates, double bin_ns, const TraceAnalysis& rank,
                     std::uint64_t origin_ns) {
  double most = 0;
  for (std::size_t bin = 0; bin < rates.size(); ++bin) {
    const double begin_ns = static_cast<double>(origin_ns) + static_cast<double>(bin) * bin_ns;
    const auto after = std::ranges::lower_bound(
        rank.steps(), begin_ns + bin_ns, {},
        [](const StepShare& step) { return static_cast<double>(step.begin_ns); });
    if (after != rank.steps().begin() && static_cast<double>(std::prev(after)->end_ns) > begin_ns)
      most = std::max(most, rates[bin]);
  }
  return most;
}

// Bytes a second in each of some bins, each transfer spread over the time that it took.
ordered_json bandwidth_json(const TraceAnalysis& rank, std::uint64_t origin_ns,
                            std::uint64_t length_ns, const PeakRates& peaks, std::size_t bins) {
  std::array<std::vector<double>, 2> rates;
  for (auto& list : rates) list.resize(bins);
  const double bin_ns = std::max(1.0, static_cast<double>(length_ns) / static_cast<double>(bins));
  for (const TraceRecord& record : rank.trace().records) {
    if (record.kind > TraceKind::kWrite || record.started_ns < origin_ns) continue;
    const double begin = static_cast<double>(record.started_ns - origin_ns) / bin_ns;
    const double end =
        std::max(begin + 1e-6, static_cast<double>(record.moved_ns - origin_ns) / bin_ns);
    auto& list = rates[record.kind == TraceKind::kWrite ? 1 : 0];
    for (auto bin = static_cast<std::size_t>(begin); bin < bins; ++bin) {
      const auto at = static_cast<double>(bin);
      const double part = std::min(end, at + 1) - std::max(begin, at);
      if (part <= 0) break;
      list[bin] += static_cast<double>(record.size_bytes) * part / (end - begin) / bin_ns * 1e9;
    }
  }
  for (auto& list : rates)
    std::ranges::transform(list, list.begin(), [](double rate) { return std::round(rate); });
  return {{"bin_us", bin_ns * 1e-3},
          {"peak", std::max(peaks.read_bytes_per_second, peaks.write_bytes_per_second)},
          {"most_read", most_in_steps(rates[0], bin_ns, rank, origin_ns)},
          {"most_written", most_in_steps(rates[1], bin_ns, rank, origin_ns)},
          {"read", rates[0]},
          {"write", rates[1]}};
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
std::string config_text(const TraceFile& trace, std::size_t bytes_max) {
  const auto section = trace.sections.find("engine");
  if (section == trace.sections.end()) return "not in this trace";
  auto document = parse_untrusted_json<ordered_json>(section->second);
  if (document.is_discarded() || !document.is_object()) return "damaged";
  for (const char* key : {"units", "forward_order", "backward_order"}) document.erase(key);
  std::string text = document.dump(2);
  if (text.size() > bytes_max) text = text.substr(0, bytes_max) + "\n(cut)";
  return text;
}

std::string head_of(const TraceAnalysis& rank, const std::vector<std::string>& left_out) {
  const TraceFile& trace = rank.trace();
  const StepMeans means = means_of(steady_steps(rank));
  std::string text = fmt::format(
      "rank {} of {}, {} steps{}, {} records, {} lost{}", trace.rank, trace.ranks,
      rank.steps().size(),
      means.count == 0 ? ", none of which ended"
                       : fmt::format(" of {:.2f} ms (mean)", 1e3 * means.total_s),
      trace.records.size(), trace.lost, trace.is_complete ? "" : "; the run did not end its trace");
  if (!left_out.empty())
    text += fmt::format("; so that it stays small, this page has {}", fmt::join(left_out, ", "));
  return text;
}

// The spans are empty texts: add_spans() fills them.
ordered_json rank_json(const TraceAnalysis& rank, const PackedRank& packed, const PeakRates& peaks,
                       std::uint64_t origin_ns, std::uint64_t length_ns, const PageRoom& room) {
  const TracedEngine engine = engine_of(rank.trace());
  ordered_json lanes = ordered_json::array();
  for (const TraceLane& lane : packed.lanes)
    lanes.push_back({{"name", lane.name}, {"color", lane.color}, {"spans", ""}});
  std::vector<std::string> left_out;
  ordered_json json = {
      {"rank", rank.trace().rank},
      {"head", ""},
      {"verdict", verdict_of(rank)},
      {"settings", setting_advice(rank, engine)},
      {"length_us", page_us(length_ns)},
      {"joined_us", UINT64_MAX},
      {"units", page_units(engine, kUnitBytesMax, left_out)},
      {"steps", steps_json(rank, origin_ns, room, left_out)},
      {"split", split_json(means_of(steady_steps(rank)))},
      {"evaluations", evaluations_json(rank, origin_ns, room, left_out)},
      {"lanes", lanes},
      {"resident", ""},
      {"held", ""},
      {"bandwidth", bandwidth_json(rank, origin_ns, length_ns, peaks, room.bandwidth_bins)},
      {"flows", flows_json(rank)},
      {"memory", memory_json(engine)},
      {"waits", waits_json(rank, engine, origin_ns, room, left_out)},
      {"config", config_text(rank.trace(), room.config_bytes)}};
  json["head"] = head_of(rank, left_out);
  return json;
}

// Gives the spans what room the rest of the page leaves.
void add_spans(ordered_json& ranks, std::vector<PackedRank>& packed, std::size_t rest_bytes) {
  if (rest_bytes + kSpanBytesMin > kPageBytesMax)
    throw Error(ErrorCode::kInput,
                fmt::format("trace html: without its timeline, the page of these {} traces has {} "
                            "bytes, and whole it may have {}; give the files of fewer ranks",
                            packed.size(), rest_bytes, kPageBytesMax));
  const std::uint64_t apart_us = thin_out(packed, kPageBytesMax - rest_bytes);
  for (std::size_t i = 0; i < packed.size(); ++i) {
    ordered_json& rank = ranks[i];
    rank["joined_us"] = apart_us;
    for (std::size_t lane = 0; lane < packed[i].lanes.size(); ++lane)
      rank["lanes"][lane]["spans"] = pack_spans(packed[i].lanes[lane].spans);
    rank["resident"] = pack_spans(packed[i].resident);
    rank["held"] = pack_spans(packed[i].held);
  }
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
  const PageRoom room = page_room(ranks.size());
  ordered_json document = {{"subjects", lane_subjects()}, {"ranks", ordered_json::array()}};
  ordered_json& list = document["ranks"];
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    list.push_back(rank_json(ranks[i], packed[i], peaks, origin_ns, length_ns, room));
    // Most often, all ranks have the same units.
    if (i != 0 && list[i]["units"] == list[0]["units"]) list[i]["units"] = nullptr;
  }
  std::string page = kTracePageText;
  constexpr std::string_view kPlace = "SLUICE_TRACE_DATA";
  add_spans(list, packed, page.size() + page_text(document).size());
  return page.replace(page.find(kPlace), kPlace.size(), page_text(document));
}

}  // namespace sluice
