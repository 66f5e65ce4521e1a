#include "tools/trace/trace_open_spans.h"

#include <algorithm>
#include <set>
#include <tuple>

namespace sluice {
namespace {

bool is_of_computation(const TraceRecord& record) {
  return record.kind == TraceKind::kCompute || record.kind == TraceKind::kWait;
}

// Spans of these kinds begin as they were announced.
auto identity(const TraceRecord& record) {
  return std::tuple(record.kind, record.unit, record.block, record.begin_ns);
}

// Where the last thing that the trace knows of was.
std::uint64_t last_ns(const TraceFile& file, const std::vector<TraceRecord>& begun) {
  std::uint64_t last = 0;
  for (const TraceRecord& record : file.records) last = std::max(last, record.end_ns);
  for (const TraceRecord& record : begun) last = std::max(last, record.begin_ns);
  return last;
}

// The step that was under way: the one that began last, if none has ended since. Earlier steps
// without an end were abandoned.
const TraceRecord* step_under_way(const TraceFile& file, const std::vector<TraceRecord>& begun) {
  const TraceRecord* last = nullptr;
  for (const TraceRecord& record : begun)
    if (record.kind == TraceKind::kStep && (last == nullptr || record.begin_ns > last->begin_ns))
      last = &record;
  const bool has_ended =
      last != nullptr && std::ranges::any_of(file.records, [&](const auto& ended) {
        return ended.kind == TraceKind::kStep && ended.end_ns > last->begin_ns;
      });
  return has_ended ? nullptr : last;
}

}  // namespace

void add_open_spans(TraceFile& file, const std::vector<TraceRecord>& begun) {
  if (file.is_complete || begun.empty()) return;
  const std::uint64_t end_ns = last_ns(file, begun);
  // Computation is at one thing at a time: what was announced last, if nothing came after it.
  const TraceRecord* computation = nullptr;
  for (const TraceRecord& record : begun) {
    if (is_of_computation(record) &&
        (computation == nullptr || record.begin_ns > computation->begin_ns))
      computation = &record;
  }
  std::set<std::tuple<TraceKind, std::uint32_t, std::uint32_t, std::uint64_t>> ended;
  for (const TraceRecord& record : file.records) {
    if (record.kind == TraceKind::kStep || record.kind == TraceKind::kResident)
      ended.insert(identity(record));
    if (computation != nullptr && record.end_ns > computation->begin_ns &&
        (is_of_computation(record) || record.kind == TraceKind::kStep))
      computation = nullptr;
  }
  const auto add = [&](TraceRecord record) {
    record.end_ns = end_ns;
    file.records.push_back(record);
  };
  const TraceRecord* const step = step_under_way(file, begun);
  if (computation != nullptr) add(*computation);
  for (const TraceRecord& record : begun) {
    if (is_of_computation(record) || !ended.insert(identity(record)).second) continue;
    if (record.kind == TraceKind::kStep && &record != step) continue;
    if (&record == step) file.open_step = record.step;
    add(record);
  }
}

}  // namespace sluice
