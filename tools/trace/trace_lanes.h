// The spans of a trace, prepared for the HTML page. The functions sort spans by lane, join spans
// that are too close to be distinguished, and pack the spans.
//
// Thread rule: any thread. The functions are pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/trace/trace_analysis.h"

namespace sluice {

struct LaneSpan {
  std::uint64_t begin_us = 0;
  std::uint64_t length_us = 0;
  std::uint32_t subject = 0;  // an index in the page's list of texts
  std::uint32_t unit = kTraceNone;
};

struct TraceLane {
  std::string name;
  std::string color;
  std::vector<LaneSpan> spans;  // in order of time
};

// The texts to which LaneSpan::subject refers.
const std::vector<std::string>& lane_subjects();

// Returns the lanes for computation, waits, each direction of each drive, copies and the optimizer.
// All times count from `origin_ns`.
std::vector<TraceLane> lanes_of(const TraceAnalysis& analysis, std::uint64_t origin_ns);
// Returns the records of kind `kind` as spans.
std::vector<LaneSpan> spans_of(const TraceAnalysis& analysis, TraceKind kind,
                               std::uint64_t origin_ns);

// Joins two spans of the same unit and subject if the gap between the spans is shorter than
// `apart_us`.
void join_spans(std::vector<LaneSpan>& spans, std::uint64_t apart_us);

// Packs each span into four varints, and encodes all varints in Base64. The four varints are the
// begin (counted from the previous span), the length, the subject, and unit + 1 (0 = no unit).
std::string pack_spans(const std::vector<LaneSpan>& spans);

}  // namespace sluice
