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
  if (computation != nullptr) add(*computation);
  for (const TraceRecord& record : begun) {
    if (is_of_computation(record) || !ended.insert(identity(record)).second) continue;
    if (record.kind == TraceKind::kStep) file.open_step = record.step;
    add(record);
  }
}

}  // namespace sluice
