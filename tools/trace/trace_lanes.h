// Spans of a trace as the page wants them: by lane, joined where they are too close to be told
// apart, and packed.
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
  std::uint32_t subject = 0;  // a number for the page's list of texts
  std::uint32_t unit = kTraceNone;
};

struct TraceLane {
  std::string name;
  std::string color;
  std::vector<LaneSpan> spans;  // in order of time
};

// Texts that spans refer to.
const std::vector<std::string>& lane_subjects();

// Lanes for computation, waits, each drive and direction, copies and the optimizer. Times from
// `origin_ns` on.
std::vector<TraceLane> lanes_of(const TraceAnalysis& analysis, std::uint64_t origin_ns);
// Records of one kind as spans.
std::vector<LaneSpan> spans_of(const TraceAnalysis& analysis, TraceKind kind,
                               std::uint64_t origin_ns);

// Joins spans of one unit and subject that begin less than `apart_us` after the end of the one
// before.
void join_spans(std::vector<LaneSpan>& spans, std::uint64_t apart_us);

// Base64 of four varints a span: begin after the one before, length, subject, unit + 1 (0 = none).
std::string pack_spans(const std::vector<LaneSpan>& spans);

}  // namespace sluice
