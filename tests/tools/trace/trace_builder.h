// These functions make traces with an artificial clock, record by record. The functions are for
// tests of programs that use traces.
#pragma once

#include <string>
#include <vector>

#include "tools/trace/trace_analysis.h"

namespace sluice::test {

// Returns a trace with `records`. The trace has the same form as a trace from read_trace().
inline TraceFile trace_of(std::vector<TraceRecord> records) {
  TraceFile file;
  file.path = "virtual";
  file.records = std::move(records);
  file.is_complete = true;
  return file;
}

// Returns the record of a read or a write. The transfer was requested at `begin`, and was done at
// `end`. The drive worked on the transfer from `started` to `moved`.
inline TraceRecord transfer(TraceKind kind, std::uint32_t block, std::uint64_t begin,
                            std::uint64_t started, std::uint64_t moved, std::uint64_t end,
                            std::uint8_t plane = kTraceParameters) {
  return {.begin_ns = begin,
          .end_ns = end,
          .started_ns = started,
          .moved_ns = moved,
          .size_bytes = 4096,
          .step = 1,
          .unit = block,
          .block = block,
          .kind = kind,
          .detail = plane};
}

inline TraceRecord span(TraceKind kind, std::uint64_t begin, std::uint64_t end,
                        std::uint32_t unit = kTraceNone, std::uint32_t block = kTraceNone) {
  return {.begin_ns = begin, .end_ns = end, .step = 1, .unit = unit, .block = block, .kind = kind};
}

inline TraceRecord wait(TraceReason reason, std::uint64_t begin, std::uint64_t end,
                        std::uint32_t block = kTraceNone) {
  TraceRecord record = span(TraceKind::kWait, begin, end, block, block);
  record.reason = reason;
  record.use = 0;
  return record;
}

}  // namespace sluice::test
