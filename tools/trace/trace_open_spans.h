// An open span is a span that had begun, but had not ended, when the run was killed. The trace
// contains the beginning of each open span (trace_begin()). add_open_spans() adds the open spans to
// the trace's records. Each added span ends when the trace ends.
//
// Thread rule: any thread. The functions are pure.
// Invariants: a trace that was closed properly has no open spans. The records contain no span
// twice.
#pragma once

#include <vector>

#include "tools/trace/trace_reader.h"

namespace sluice {

// Adds each span of `begun` to the records of `file`, unless `file` already contains the complete
// span.
void add_open_spans(TraceFile& file, const std::vector<TraceRecord>& begun);

}  // namespace sluice
