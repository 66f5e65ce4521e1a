#include "tools/trace/trace_json.h"

#include <nlohmann/json.hpp>

#include "tools/trace/trace_ranks.h"
#include "tools/trace/trace_steps.h"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

std::string written(const Json& root) {
  return root.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

double seconds(std::uint64_t duration_ns) {
  return static_cast<double>(duration_ns) * 1e-9;
}

Json json_of(const StepMeans& means) {
  return {{"count", means.count},
          {"mean_s", means.total_s},
          {"least_s", means.least_s},
          {"most_s", means.most_s},
          {"compute_s", means.compute_s},
          {"exposed_io_s", means.exposed_io_s},
          {"exposed_optimizer_s", means.exposed_optimizer_s},
          {"other_s", means.other_s},
          {"background_s", means.background_s},
          {"hidden_share", means.hidden_share()}};
}

Json json_of(const Percentiles& times) {
  return {{"p50", seconds(times.p50_ns)},
          {"p99", seconds(times.p99_ns)},
          {"p99.9", seconds(times.p999_ns)}};
}

Json json_of(const FlowStats& flow, const TracedEngine& engine, const PeakRates& peaks) {
  const double peak = peak_of(flow, engine, peaks);
  return {{"name", name_of(flow.key())},
          {"spans", flow.spans},
          {"size_bytes", flow.size_bytes},
          {"busy_s", seconds(flow.busy_ns)},
          {"bytes_per_second", flow.bytes_per_second()},
          {"share_of_peak", peak == 0 ? Json() : Json(flow.bytes_per_second() / peak)},
          {"queued_s", json_of(flow.queue)},
          {"moved_s", json_of(flow.device)}};
}

Json storage_json(const TraceAnalysis& rank, const TracedEngine& engine, double all_per_day,
                  const SummaryOptions& options) {
  const std::optional<StorageBytes> bytes = storage_bytes(rank, engine);
  if (!bytes) return {};
  const bool has_ideal = engine.parameters != 0;
  const bool has_life = options.bytes_written_rating != 0 && all_per_day != 0;
  return {
      {"read_bytes_per_step", bytes->read_per_step},
      {"ideal_read_bytes_per_step", has_ideal ? Json(bytes->ideal_read) : Json()},
      {"written_bytes_per_step", bytes->written_per_step},
      {"ideal_written_bytes_per_step", has_ideal ? Json(bytes->ideal_written) : Json()},
      {"written_bytes_per_day", bytes->written_per_day},
      {"drives_last_days",
       has_life ? Json(static_cast<double>(options.bytes_written_rating) / all_per_day) : Json()}};
}

Json waits_json(const TraceAnalysis& rank, const TracedEngine& engine) {
  std::int64_t total_ns = 0;
  for (const StepShare& step : steady_steps(rank)) total_ns += step.total_ns();
  Json waits = Json::array();
  for (const StallGroup& group : group_stalls(rank)) {
    const double whole_s = static_cast<double>(total_ns) * 1e-9;
    waits.push_back(
        {{"cause", name_of(group.cause)},
         {"reason", name_of(group.reason)},
         {"count", group.spans},
         {"total_s", seconds(group.total_ns)},
         {"share_of_steps", whole_s <= 0 ? Json() : Json(seconds(group.total_ns) / whole_s)},
         {"longest_unit", group.unit == kTraceNone ? Json() : Json(engine.unit_name(group.unit))},
         {"longest_block", group.block == kTraceNone ? Json() : Json(group.block)},
         {"advice", advice_for(group, rank, engine)}});
  }
  return waits;
}

Json clock_json(const TraceFile& trace) {
  if (!trace.clock_offset_ns) return {};
  return {{"offset_s", static_cast<double>(*trace.clock_offset_ns) * 1e-9},
          {"error_s", seconds(trace.clock_error_ns)}};
}

Json rank_json(const TraceAnalysis& rank, double all_per_day, const SummaryOptions& options) {
  const TraceFile& trace = rank.trace();
  const TracedEngine engine = engine_of(trace);
  Json flows = Json::array();
  for (const FlowStats& flow : rank.flows()) flows.push_back(json_of(flow, engine, options.peaks));
  return {{"rank", trace.rank},
          {"file", trace.path},
          {"records", trace.records.size()},
          {"lost_records", trace.lost},
          {"damaged_blocks", trace.damaged_blocks},
          {"is_complete", trace.is_complete},
          {"clock", clock_json(trace)},
          {"open_step", trace.open_step == 0 ? Json() : Json(trace.open_step)},
          {"parameters", engine.is_known ? Json(engine.parameters) : Json()},
          {"steps", rank.steps().size()},
          {"steady_steps", json_of(means_of(steady_steps(rank)))},
          {"storage", storage_json(rank, engine, all_per_day, options)},
          {"flows", std::move(flows)},
          {"waits", waits_json(rank, engine)},
          {"settings", setting_advice(rank, engine)}};
}

Json json_of(const TraceChange& change) {
  return {{"name", change.name},
          {"before_s", change.before_ms * 1e-3},
          {"after_s", change.after_ms * 1e-3},
          {"difference_s", change.difference_ms() * 1e-3},
          {"margin_s", change.margin_ms * 1e-3},  // NaN is written as null
          {"is_certain", change.is_certain()}};
}

Json json_of(const std::vector<TraceChange>& changes) {
  Json list = Json::array();
  for (const TraceChange& change : changes) list.push_back(json_of(change));
  return list;
}

}  // namespace

std::string summary_json(const std::vector<TraceAnalysis>& ranks, const SummaryOptions& options) {
  const TraceAnalysis& slowest = slowest_of(ranks);
  Json root = {{"verdict", verdict_of(slowest)},
               {"ranks_of_the_run", slowest.trace().ranks},
               {"slowest_rank", slowest.trace().rank},
               {"ranks", Json::array()}};
  const double all_per_day = written_per_day(ranks);
  for (const TraceAnalysis& rank : ranks)
    root["ranks"].push_back(rank_json(rank, all_per_day, options));
  const RankLags lags = rank_lags(ranks);
  root["collectives"] = lags.collectives;
  root["late"] = Json::array();
  for (const RankLag& lag : lags.ranks)
    root["late"].push_back(
        {{"rank", lag.rank}, {"last_to", lag.last}, {"late_s", seconds(lag.late_ns)}});
  return written(root);
}

std::string diff_json(const TraceDiff& diff, double percent) {
  Json settings = Json::array();
  for (const TraceSetting& setting : diff.settings)
    settings.push_back(
        {{"name", setting.name}, {"before", setting.before}, {"after", setting.after}});
  return written({{"is_regression", diff.is_regression(percent)},
                  {"regression_percent", percent},
                  {"step", json_of(diff.step)},
                  {"parts", json_of(diff.parts)},
                  {"causes", json_of(diff.causes)},
                  {"units", json_of(diff.units)},
                  {"settings", diff.are_settings_known ? std::move(settings) : Json()}});
}

std::string whatif_json(const WhatIf& what_if) {
  Json busy = Json::object();
  for (std::size_t i = 0; i < kResourceCount; ++i) {
    const double before = what_if.replayed.busy_s[i], after = what_if.changed.busy_s[i];
    if (before == 0 && after == 0) continue;
    busy[std::string(name_of(static_cast<Resource>(i)))] = {{"recorded_s", before},
                                                            {"predicted_s", after}};
  }
  return written({{"policy", name_of(what_if.policy)},
                  {"predicted_policy", name_of(what_if.changed_policy)},
                  {"recorded_step_s", what_if.measured_s},
                  {"model_step_s", what_if.replayed.step_s},
                  {"model_error", what_if.error()},
                  {"predicted_step_s", what_if.predicted_s},
                  {"busiest_recorded", name_of(what_if.replayed.scarcest())},
                  {"busiest_predicted", name_of(what_if.changed.scarcest())},
                  {"busy", std::move(busy)},
                  {"left_out", what_if.left_out}});
}

}  // namespace sluice
