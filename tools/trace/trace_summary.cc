#include "tools/trace/trace_summary.h"

#include <algorithm>
#include <filesystem>

#include <fmt/format.h>

#include <sluice/units.h>
#include "tools/trace/trace_ranks.h"
#include "tools/trace/trace_steps.h"

namespace sluice {
namespace {

constexpr std::size_t kLinesMax = 40;
constexpr std::size_t kRanksMax = 8;   // shown one by one
constexpr std::size_t kFlowsMax = 12;  // of all ranks
constexpr std::size_t kStallsMax = 5;  // each takes two lines
constexpr double kSecondsADay = 86400;

double ms(std::uint64_t duration_ns) {
  return static_cast<double>(duration_ns) * 1e-6;
}

double percent(std::int64_t part, std::int64_t whole) {
  return whole <= 0 ? 0 : 100 * static_cast<double>(part) / static_cast<double>(whole);
}

std::string head_line(const TraceAnalysis& rank) {
  const TraceFile& trace = rank.trace();
  const TracedEngine engine = engine_of(trace);
  std::string line =
      fmt::format("rank {} of {}: {} steps, {} records, {} lost", trace.rank, trace.ranks,
                  rank.steps().size(), trace.records.size(), trace.lost);
  if (!trace.is_complete) line += "; the run did not end its trace";
  if (trace.open_step != 0) line += fmt::format(", which ends in step {}", trace.open_step);
  if (trace.damaged_blocks != 0)
    line += fmt::format("; {} damaged pieces left out", trace.damaged_blocks);
  if (engine.is_known)
    line += fmt::format("; {} parameters, {}", engine.parameters, engine.processor);
  return line;
}

// Says what was at work in a trace without a step that ended, such as that of an optimizer alone.
std::string work_lines(const TraceAnalysis& rank) {
  IntervalSet computation, waits, storage;
  std::uint64_t begin_ns = UINT64_MAX, end_ns = 0, updates = 0, size_bytes = 0, update_ns = 0;
  for (const TraceRecord& record : rank.trace().records) {
    begin_ns = std::min(begin_ns, record.begin_ns);
    end_ns = std::max(end_ns, record.end_ns);
    if (record.kind <= TraceKind::kWrite) storage.add(record.started_ns, record.moved_ns);
    if (record.kind == TraceKind::kCompute) computation.add(record.begin_ns, record.end_ns);
    if (record.kind == TraceKind::kWait) waits.add(record.begin_ns, record.end_ns);
    if (record.kind != TraceKind::kAdam) continue;
    ++updates;
    size_bytes += record.size_bytes;
    update_ns += record.end_ns - record.begin_ns;
  }
  if (end_ns <= begin_ns) return {};
  const std::uint64_t all_ns = end_ns - begin_ns;
  std::string shares;
  const auto add = [&](std::string_view name, std::uint64_t busy_ns) {
    if (busy_ns == 0) return;
    shares +=
        fmt::format("{}{} {:.1f} %", shares.empty() ? "" : ", ", name,
                    percent(static_cast<std::int64_t>(busy_ns), static_cast<std::int64_t>(all_ns)));
  };
  for (IntervalSet* set : {&computation, &waits, &storage}) set->seal();
  add("compute", computation.busy_ns());
  add("waits", waits.busy_ns());
  add("updates and norms", rank.processor().busy_ns());
  add("storage", storage.busy_ns());
  for (const FlowStats& flow : rank.flows()) {
    if (flow.kind == TraceKind::kCopyToDevice || flow.kind == TraceKind::kCopyToHost)
      add(name_of(flow.key()), flow.busy_ns);
  }
  std::string text = fmt::format("at work in the {:.2f} ms from the first record to the last: {}\n",
                                 ms(all_ns), shares.empty() ? "nothing" : shares);
  if (updates != 0)
    text += fmt::format(
        "{} updates of blocks: {} of state at {:.2f} GB/s, {:.3f} ms each\n", updates,
        format_bytes(size_bytes),
        update_ns == 0 ? 0 : static_cast<double>(size_bytes) / static_cast<double>(update_ns),
        ms(update_ns) / static_cast<double>(updates));
  return text;
}

std::string time_lines(const TraceAnalysis& rank) {
  const StepMeans means = means_of(steady_steps(rank));
  if (means.count == 0) return work_lines(rank);
  const auto percent_of = [&](double part_s) { return 100 * means.share_of_step(part_s); };
  return fmt::format(
      "mean step {:.2f} ms [{:.2f}, {:.2f}]: compute {:.1f} %, exposed I/O {:.1f} %, exposed "
      "optimizer {:.1f} %, other {:.1f} %\n"
      "hidden: {:.1f} % of the {:.2f} ms per step that storage, copies and the optimizer worked\n",
      1e3 * means.total_s, 1e3 * means.least_s, 1e3 * means.most_s, percent_of(means.compute_s),
      percent_of(means.exposed_io_s), percent_of(means.exposed_optimizer_s),
      percent_of(means.other_s), 100 * means.hidden_share(), 1e3 * means.background_s);
}

std::string byte_lines(const TraceAnalysis& rank, const TracedEngine& engine, double all_per_day,
                       const SummaryOptions& options) {
  const std::optional<StorageBytes> bytes = storage_bytes(rank, engine);
  if (!bytes) return {};
  std::string lines;
  if (engine.own_parameters != 0) {
    const auto each = [&](double of) { return of / static_cast<double>(engine.own_parameters); };
    lines += fmt::format(
        "bytes per parameter and step: {:.2f} read (ideal {:.2f}), {:.2f} written (ideal {:.2f})\n",
        each(bytes->read_per_step), each(bytes->ideal_read), each(bytes->written_per_step),
        each(bytes->ideal_written));
  }
  if (all_per_day == 0) return lines;
  lines += fmt::format("written to storage: {:.2f} TB per day", all_per_day * 1e-12);
  if (rank.trace().ranks > 1) lines += " by all ranks here";
  if (options.bytes_written_rating != 0)
    lines += fmt::format("; drives rated for {:.4g} TB last {:.0f} days",
                         static_cast<double>(options.bytes_written_rating) * 1e-12,
                         static_cast<double>(options.bytes_written_rating) / all_per_day);
  return lines + "\n";
}

std::string flow_line(const TraceAnalysis& rank, const FlowStats& flow, const TracedEngine& engine,
                      const PeakRates& peaks) {
  const double peak = peak_of(flow, engine, peaks);
  const auto three = [](const Percentiles& times) {
    return fmt::format("{:.2f}/{:.2f}/{:.2f}", ms(times.p50_ns), ms(times.p99_ns),
                       ms(times.p999_ns));
  };
  return fmt::format(
      "{:>4} {:<15}{:>9}{:>10}{:>8.2f}{:>8}  {:<21}{:<21}\n", rank.trace().rank,
      name_of(flow.key()), flow.spans, format_bytes(flow.size_bytes),
      flow.bytes_per_second() * 1e-9,
      peak == 0 ? "-" : fmt::format("{:.0f} %", 100 * flow.bytes_per_second() / peak),
      three(flow.queue), three(flow.device));
}

// The waits of computation and of the end of the step. Waits of the optimizer pass are left out:
// they cost nothing as long as nothing waits for the pass, and where something does, that wait is
// in the list.
std::string stall_lines(const TraceAnalysis& rank, std::size_t lines_left) {
  const TracedEngine engine = engine_of(rank.trace());
  std::int64_t total_ns = 0;
  for (const StepShare& step : steady_steps(rank)) total_ns += step.total_ns();
  std::string lines;
  std::size_t shown = 0;
  for (const StallGroup& group : group_stalls(rank)) {
    if (shown++ == kStallsMax || 2 * shown > lines_left) break;
    const std::string place =
        group.unit == kTraceNone ? ""
        : group.block == kTraceNone
            ? fmt::format(", longest for unit {}", engine.unit_name(group.unit))
            : fmt::format(", longest for unit {}, block {}", engine.unit_name(group.unit),
                          group.block);
    lines += fmt::format("{:>6.2f} %  {}: {} waits{}\n          {}\n",
                         percent(static_cast<std::int64_t>(group.total_ns), total_ns),
                         name_of(group.cause), group.spans, place, advice_for(group, rank, engine));
  }
  return lines;
}

// Whom the ranks wait for.
std::string lag_line(const std::vector<TraceAnalysis>& ranks) {
  const RankLags lags = rank_lags(ranks);
  if (lags.collectives == 0) return {};
  const RankLag& most = *std::ranges::max_element(lags.ranks, {}, &RankLag::late_ns);
  const std::size_t steps = std::max<std::size_t>(1, ranks.front().steps().size());
  return fmt::format(
      "the others wait for rank {} most: last to {} of {} collectives, by {:.2f} ms per step\n",
      most.rank, most.last, lags.collectives, ms(most.late_ns) / static_cast<double>(steps));
}

// A read for a step that has not begun, or after a skipped one, is of an evaluation or a
// checkpoint. A step that is followed by one of the same number was skipped: it has no update.
bool is_of_no_step(const TraceRecord& read, const std::vector<StepShare>& steps) {
  const auto after = std::ranges::upper_bound(steps, read.begin_ns, {}, &StepShare::begin_ns);
  if (after == steps.begin()) return true;
  const StepShare& last = *std::prev(after);
  if (read.step > last.step) return true;
  const bool is_skipped = after != steps.end() && after->step == last.step;
  return is_skipped && read.step == last.step && read.begin_ns >= last.end_ns;
}

// Under the path's one name, whatever the trace or the calibration calls it.
auto drive_of(const std::string& path, const PeakRates& peaks) {
  return std::ranges::find(peaks.drives, one_name_of(path),
                           [](const DriveRates& drive) { return one_name_of(drive.path); });
}

std::size_t lines_of(const std::string& text) {
  return static_cast<std::size_t>(std::ranges::count(text, '\n'));
}

}  // namespace

std::optional<StorageBytes> storage_bytes(const TraceAnalysis& rank, const TracedEngine& engine) {
  if (rank.steps().size() < 3) return std::nullopt;
  const std::vector<StepShare> counted(
      rank.steps().begin() + static_cast<std::ptrdiff_t>(first_steady(rank)),
      rank.steps().end() - 1);
  const StepShare& after = rank.steps().back();
  const StepShare& begin_step = counted.front();
  std::uint64_t read = 0, written = 0;
  for (const TraceRecord& record : rank.trace().records) {
    if (record.kind > TraceKind::kWrite) continue;
    // A skipped step has the number of the step after it.
    const bool is_after = record.step == after.step && record.begin_ns >= after.begin_ns;
    if (record.step < begin_step.step || record.step > counted.back().step || is_after ||
        record.begin_ns < begin_step.begin_ns)
      continue;
    if (record.kind == TraceKind::kRead && !is_of_no_step(record, rank.steps()))
      read += record.size_bytes;
    if (record.kind == TraceKind::kWrite) written += record.size_bytes;
  }
  std::uint64_t parameter_bytes = 0, stored = 0;  // of one copy
  for (const TracedPool& pool : engine.pools) {
    if (pool.tier != "nvme" || pool.name == "shadow copies" || pool.name == "copies for commits")
      continue;
    stored += pool.size_bytes;
    if (pool.name == "parameters") parameter_bytes += pool.size_bytes;
  }
  // Frozen parameters are read alone. A rank has the same share of all units.
  double unit_bytes = 0, frozen_bytes = 0;
  for (std::size_t i = 0; i < engine.units.size(); ++i) {
    if (engine.parameter_tier[i] != "nvme") continue;
    const auto of_unit = static_cast<double>(engine.units[i].parameter_bytes);
    unit_bytes += of_unit;
    if (engine.units[i].is_frozen) frozen_bytes += of_unit;
  }
  const double frozen =
      unit_bytes == 0 ? 0 : static_cast<double>(parameter_bytes) * frozen_bytes / unit_bytes;
  const auto steps = static_cast<double>(counted.size());
  const double span_s =
      static_cast<double>(rank.steps().back().begin_ns - begin_step.begin_ns) * 1e-9;
  return StorageBytes{.read_per_step = static_cast<double>(read) / steps,
                      .written_per_step = static_cast<double>(written) / steps,
                      .ideal_read = static_cast<double>(stored + parameter_bytes),
                      .ideal_written = static_cast<double>(stored) - frozen,
                      .written_per_day = static_cast<double>(written) / span_s * kSecondsADay};
}

double written_per_day(const std::vector<TraceAnalysis>& ranks) {
  double sum = 0;
  for (const TraceAnalysis& rank : ranks) {
    if (const auto bytes = storage_bytes(rank, engine_of(rank.trace())))
      sum += bytes->written_per_day;
  }
  return sum;
}

double peak_of(const FlowStats& flow, const TracedEngine& engine, const PeakRates& peaks) {
  if (flow.kind > TraceKind::kWrite) return 0;
  const bool is_read = flow.kind == TraceKind::kRead;
  const std::vector<std::string>& paths = engine.storage_paths;
  const auto rate_of = [&](const auto& of) {
    return is_read ? of.read_bytes_per_second : of.write_bytes_per_second;
  };
  if (flow.drive < paths.size()) {
    const auto found = drive_of(paths[flow.drive], peaks);
    if (found != peaks.drives.end()) return rate_of(*found);
  }
  // By its number, only where no name says otherwise: a relative path may be any drive's.
  const bool are_named = std::ranges::any_of(paths, [&](const std::string& path) {
    return drive_of(path, peaks) != peaks.drives.end() ||
           (paths.size() > 1 && std::filesystem::path(path).is_relative());
  });
  if (are_named) return 0;
  const bool is_alone = paths.empty() ? flow.drive == 0 : paths.size() == 1;
  if (is_alone && peaks.drives.size() <= 1) return rate_of(peaks);
  const bool is_known = paths.size() == peaks.drives.size() && flow.drive < paths.size();
  return is_known ? rate_of(peaks.drives[flow.drive]) : 0;
}

const TraceAnalysis& slowest_of(const std::vector<TraceAnalysis>& ranks) {
  return *std::ranges::max_element(
      ranks, {}, [](const TraceAnalysis& rank) { return means_of(steady_steps(rank)).total_s; });
}

std::string summary_of(const std::vector<TraceAnalysis>& ranks, const SummaryOptions& options) {
  // The slowest rank decides how long a step takes.
  const TraceAnalysis& slowest = slowest_of(ranks);
  std::string text = verdict_of(slowest) + "\n";
  for (std::size_t i = 0; i < std::min(ranks.size(), kRanksMax); ++i)
    text += head_line(ranks[i]) + "\n";
  if (ranks.size() > kRanksMax)
    text += fmt::format("and {} more ranks\n", ranks.size() - kRanksMax);
  if (ranks.size() > 1) text += fmt::format("of rank {}, the slowest:\n", slowest.trace().rank);
  text += time_lines(slowest);
  text += byte_lines(slowest, engine_of(slowest.trace()), written_per_day(ranks), options);
  std::size_t flows = 0;
  for (const TraceAnalysis& rank : ranks) {
    const TracedEngine engine = flows < kFlowsMax ? engine_of(rank.trace()) : TracedEngine();
    for (const FlowStats& flow : rank.flows()) {
      if (flows == 0)
        text +=
            fmt::format("{:>4} {:<15}{:>9}{:>10}{:>8}{:>8}  {:<21}{:<21}\n", "rank", "flow",
                        "spans", "bytes", "GB/s", "of peak", "queued p50/99/99.9", "moved (ms)");
      if (flows++ < kFlowsMax) text += flow_line(rank, flow, engine, options.peaks);
    }
  }
  if (flows > kFlowsMax) text += fmt::format("     and {} more\n", flows - kFlowsMax);
  text += lag_line(ranks);
  const std::vector<std::string> settings = setting_advice(slowest, engine_of(slowest.trace()));
  if (!settings.empty()) {
    text += "settings that make the steps longer:\n";
    for (const std::string& line : settings) text += "  " + line + "\n";
  }
  const std::string stalls = stall_lines(slowest, kLinesMax - lines_of(text) - 1);
  if (!stalls.empty())
    text += "exposed waits, as shares of the steps' time, and what would help:\n" + stalls;
  return text;
}

}  // namespace sluice
