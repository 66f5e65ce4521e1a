// The spans that had begun but not ended when a run was killed. The trace announces such spans
// (trace_begin()). Here such spans end with the trace.
//
// Thread rule: pure.
// Invariant: a trace that was closed properly has no open spans. No span is in the trace twice.
#pragma once

#include <vector>

#include "tools/trace/trace_reader.h"

namespace sluice {

// Adds each span of `begun` to the records of `file`, unless the span's own record is in the file.
void add_open_spans(TraceFile& file, const std::vector<TraceRecord>& begun);

}  // namespace sluice
