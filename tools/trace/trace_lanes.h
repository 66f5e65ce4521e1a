// The spans of a trace for the page. The spans are sorted by lane, joined if they are too close to
// be told apart, and packed.
//
// Thread rule: pure.
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

// The texts that spans refer to.
const std::vector<std::string>& lane_subjects();

// The lanes for computation, waits, each drive and direction, copies and the optimizer. All times
// count from `origin_ns`.
std::vector<TraceLane> lanes_of(const TraceAnalysis& analysis, std::uint64_t origin_ns);
// The records of one kind as spans.
std::vector<LaneSpan> spans_of(const TraceAnalysis& analysis, TraceKind kind,
                               std::uint64_t origin_ns);

// The function joins two spans of the same unit and subject, if the second span begins less than
// `apart_us` after the end of the first span.
void join_spans(std::vector<LaneSpan>& spans, std::uint64_t apart_us);

// The function packs each span into four varints, and the whole into Base64. The varints are the
// begin (counted from the previous span), the length, the subject, and unit + 1 (0 = none).
std::string pack_spans(const std::vector<LaneSpan>& spans);

}  // namespace sluice
