#include "tools/trace/trace_analysis.h"

#include <algorithm>
#include <map>

namespace sluice {
namespace {

void sort_by_begin(auto& index) {
  for (auto& [key, records] : index)
    std::ranges::sort(records, {}, [](const TraceRecord* record) { return record->begin_ns; });
}

std::uint64_t median_of(std::vector<std::uint64_t>& values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

// The times of all transfers of one flow.
struct Durations {
  std::uint64_t size_bytes = 0;
  std::vector<std::uint64_t> queue, device, whole;
  IntervalSet busy;
};

}  // namespace

std::string_view name_of(StallCause cause) {
  switch (cause) {
    case StallCause::kEngine: return "engine";
    case StallCause::kLatePrefetch: return "prefetched too late";
    case StallCause::kBandwidth: return "drive bandwidth";
    case StallCause::kLatencyTail: return "drive latency tail";
    case StallCause::kNoBuffer: return "no free buffer";
    case StallCause::kCopyLink: return "copy link";
    case StallCause::kAdam: return "Adam";
    case StallCause::kCollective: return "collective";
    case StallCause::kChecksum: return "checksum";
    case StallCause::kSchedule: return "schedule changed";
    case StallCause::kCommit: return "commit";
    case StallCause::kSave: return "checkpoint";
    case StallCause::kAnnounce: return "announcement";
  }
  return "unknown";
}

std::int64_t StepShare::hidden_ns() const {
  return std::max<std::int64_t>(
      0, static_cast<std::int64_t>(background_ns) - (exposed_ns() - rank_wait_ns));
}

double FlowStats::bytes_per_second() const {
  if (busy_ns == 0) return 0;
  return static_cast<double>(size_bytes) * 1e9 / static_cast<double>(busy_ns);
}

std::string name_of(const FlowKey& flow) {
  const TraceRecord record{.kind = flow.kind, .detail = static_cast<std::uint8_t>(flow.drive)};
  if (flow.kind == TraceKind::kCollective) return span_name(record, {});
  std::string name(name_of(flow.kind));
  return flow.kind <= TraceKind::kWrite ? name + " drive " + std::to_string(flow.drive) : name;
}

std::optional<FlowKey> flow_of(const TraceRecord& record) {
  if (record.kind <= TraceKind::kCopyToHost) return FlowKey{record.kind, record.lane};
  // Votes are no load on a network.
  if (record.kind == TraceKind::kCollective && record.detail < kTraceVote)
    return FlowKey{record.kind, record.detail};
  return std::nullopt;
}

std::uint64_t started_ns(const TraceRecord& record) {
  return record.kind == TraceKind::kCollective ? record.begin_ns : record.started_ns;
}

std::uint64_t moved_ns(const TraceRecord& record) {
  return record.kind == TraceKind::kCollective ? record.end_ns : record.moved_ns;
}

// Nearest rank: the smallest value that at least that share of all values does not exceed.
Percentiles percentiles_of(std::vector<std::uint64_t> durations_ns) {
  if (durations_ns.empty()) return {};
  const auto at = [&](std::uint64_t per_mille) {
    const std::uint64_t count = durations_ns.size();
    const std::uint64_t rank = (count * per_mille + 999) / 1000;
    const auto place = durations_ns.begin() + static_cast<std::ptrdiff_t>(rank - 1);
    std::ranges::nth_element(durations_ns, place);
    return *place;
  };
  return {.p50_ns = at(500), .p99_ns = at(990), .p999_ns = at(999)};
}

TraceAnalysis::TraceAnalysis(const TraceFile& trace) : trace_(trace) {
  lay_out();
  collect_flows();
  judge_waits();
  judge_pass();
  std::ranges::stable_sort(stalls_, {}, &Stall::begin_ns);
  share_steps();
}

// Sorts the records for later questions.
void TraceAnalysis::lay_out() {
  std::array<std::vector<std::uint64_t>, 4> read_ns;
  for (const TraceRecord& record : trace_.records) {
    switch (record.kind) {
      case TraceKind::kRead:
      case TraceKind::kWrite:
        if (record.lane >= drives_.size()) drives_.resize(record.lane + 1u);
        drives_[record.lane].add(record.started_ns, record.moved_ns);
        requests_.add(record.begin_ns, record.moved_ns);
        background_.add(record.begin_ns, record.end_ns);
        if (record.kind == TraceKind::kWrite) break;
        reads_[read_key(record)].push_back(&record);
        read_ns[std::min<std::size_t>(record.detail, 3)].push_back(record.moved_ns -
                                                                   record.started_ns);
        break;
      case TraceKind::kCopyToDevice:
        link_up_.add(record.started_ns, record.moved_ns);
        background_.add(record.started_ns, record.moved_ns);
        if (record.detail != kTraceActivations) copies_[record.unit].push_back(&record);
        break;
      case TraceKind::kCopyToHost: link_down_.add(record.started_ns, record.moved_ns); break;
      case TraceKind::kAdam:
      case TraceKind::kAccumulate:
      case TraceKind::kNorm:
        processor_.add(record.begin_ns, record.end_ns);
        background_.add(record.begin_ns, record.end_ns);
        break;
      case TraceKind::kLane: lanes_[record.block].push_back(&record); break;
      case TraceKind::kOnDevice:
        streams_updates_ = streams_updates_ || record.block != kTraceNone;
        break;
      default: break;
    }
  }
  for (IntervalSet& drive : drives_) drive.seal();
  for (IntervalSet* set : {&requests_, &processor_, &link_up_, &link_down_, &background_})
    set->seal();
  for (Index* index : {&reads_, &copies_, &lanes_}) sort_by_begin(*index);
  for (std::size_t plane = 0; plane < 4; ++plane)
    median_read_ns_[plane] = median_of(read_ns[plane]);
}

void TraceAnalysis::collect_flows() {
  std::map<FlowKey, Durations> durations;
  for (const TraceRecord& record : trace_.records) {
    const std::optional<FlowKey> key = flow_of(record);
    if (!key) continue;
    Durations& flow = durations[*key];
    const std::uint64_t started = started_ns(record), moved = moved_ns(record);
    flow.size_bytes += record.size_bytes;
    flow.queue.push_back(started - std::min(record.begin_ns, started));
    flow.device.push_back(moved - std::min(started, moved));
    flow.whole.push_back(record.end_ns - record.begin_ns);
    flow.busy.add(started, moved);
  }
  for (auto& [key, flow] : durations) {
    flow.busy.seal();
    flows_.push_back({.kind = key.kind,
                      .drive = key.drive,
                      .spans = flow.whole.size(),
                      .size_bytes = flow.size_bytes,
                      .busy_ns = flow.busy.busy_ns(),
                      .queue = percentiles_of(std::move(flow.queue)),
                      .device = percentiles_of(std::move(flow.device)),
                      .whole = percentiles_of(std::move(flow.whole))});
  }
}

}  // namespace sluice
