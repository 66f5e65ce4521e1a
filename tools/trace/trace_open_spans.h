// Spans that had begun and not ended when a run was killed: the trace announces them
// (trace_begin()), and here they get the end of the trace as theirs.
//
// Thread rule: pure.
// Invariant: a trace that was ended properly has none; a span is never there twice.
#pragma once

#include <vector>

#include "tools/trace/trace_reader.h"

namespace sluice {

// Adds those of `begun` whose record did not follow to the records of `file`.
void add_open_spans(TraceFile& file, const std::vector<TraceRecord>& begun);

}  // namespace sluice
