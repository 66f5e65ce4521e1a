#include "tools/trace/trace_lanes.h"

#include <algorithm>

#include <fmt/format.h>

namespace sluice {
namespace {

constexpr std::uint32_t kCollectiveSubject = 3;  // and one for each sort from here on
constexpr std::uint32_t kCauseSubject = 7;       // and one for each cause

std::uint32_t subject_of(const TraceRecord& record) {
  if (record.kind == TraceKind::kCompute) return 1 + std::min<std::uint32_t>(record.detail, 1);
  if (record.kind == TraceKind::kCollective)
    return kCollectiveSubject + std::min<std::uint32_t>(record.detail, kTraceVote);
  return 0;
}

void sort_spans(std::vector<LaneSpan>& spans) {
  std::ranges::stable_sort(spans, {}, &LaneSpan::begin_us);
}

LaneSpan span_of(std::uint64_t begin_ns, std::uint64_t end_ns, std::uint64_t origin_ns,
                 std::uint32_t subject, std::uint32_t unit) {
  const std::uint64_t begin_us = (begin_ns - std::min(begin_ns, origin_ns)) / 1000;
  const std::uint64_t end_us = (end_ns - std::min(end_ns, origin_ns)) / 1000;
  return {.begin_us = begin_us,
          .length_us = end_us - std::min(begin_us, end_us),
          .subject = subject,
          .unit = unit};
}

}  // namespace

const std::vector<std::string>& lane_subjects() {
  static const std::vector<std::string> subjects = [] {
    std::vector<std::string> list{"", "forward", "backward"};
    for (std::uint8_t sort = kTraceGather; sort <= kTraceVote; ++sort)
      list.push_back(span_name({.kind = TraceKind::kCollective, .detail = sort}, {}));
    for (std::size_t cause = 0; cause < kStallCauses; ++cause)
      list.emplace_back(name_of(static_cast<StallCause>(cause)));
    return list;
  }();
  return subjects;
}

std::vector<LaneSpan> spans_of(const TraceAnalysis& analysis, TraceKind kind,
                               std::uint64_t origin_ns) {
  std::vector<LaneSpan> spans;
  for (const TraceRecord& record : analysis.trace().records) {
    if (record.kind != kind || record.end_ns < origin_ns) continue;
    const std::uint64_t begin_ns =
        kind <= TraceKind::kCopyToHost ? record.started_ns : record.begin_ns;
    spans.push_back(span_of(begin_ns, record.end_ns, origin_ns, subject_of(record), record.unit));
  }
  sort_spans(spans);
  return spans;
}

std::vector<TraceLane> lanes_of(const TraceAnalysis& analysis, std::uint64_t origin_ns) {
  std::vector<TraceLane> lanes;
  lanes.push_back({"compute", "compute", spans_of(analysis, TraceKind::kCompute, origin_ns)});
  TraceLane waits{"waits", "wait", {}}, pass_waits{"waits of the pass", "wait", {}};
  for (const Stall& stall : analysis.stalls()) {
    if (stall.end_ns < origin_ns) continue;
    (stall.is_of_pass ? pass_waits : waits)
        .spans.push_back(span_of(stall.begin_ns, stall.end_ns, origin_ns,
                                 kCauseSubject + static_cast<std::uint32_t>(stall.cause),
                                 stall.record->unit));
  }
  lanes.push_back(std::move(waits));
  lanes.push_back({"copies up", "up", spans_of(analysis, TraceKind::kCopyToDevice, origin_ns)});
  lanes.push_back({"copies down", "down", spans_of(analysis, TraceKind::kCopyToHost, origin_ns)});
  std::vector<TraceLane> drives(2 * analysis.drive_count());
  for (std::size_t i = 0; i < drives.size(); ++i) {
    drives[i].name = fmt::format("drive {} {}", i / 2, i % 2 == 0 ? "reads" : "writes");
    drives[i].color = i % 2 == 0 ? "read" : "write";
  }
  TraceLane processor{"Adam and norms", "adam", {}};
  for (const TraceRecord& record : analysis.trace().records) {
    if (record.end_ns < origin_ns) continue;
    if (record.kind <= TraceKind::kWrite) {
      const std::size_t lane = 2u * record.lane + (record.kind == TraceKind::kWrite ? 1 : 0);
      drives[lane].spans.push_back(
          span_of(record.started_ns, record.moved_ns, origin_ns, 0, record.unit));
    } else if (record.kind >= TraceKind::kAdam && record.kind <= TraceKind::kNorm) {
      processor.spans.push_back(span_of(record.begin_ns, record.end_ns, origin_ns, 0, record.unit));
    }
  }
  for (TraceLane& drive : drives) lanes.push_back(std::move(drive));
  TraceLane flushes{"flushes", "write", spans_of(analysis, TraceKind::kFlush, origin_ns)};
  if (!flushes.spans.empty()) lanes.push_back(std::move(flushes));
  TraceLane ranks{"among ranks", "rank", spans_of(analysis, TraceKind::kCollective, origin_ns)};
  if (!ranks.spans.empty()) lanes.push_back(std::move(ranks));
  TraceLane device{"updates on the device", "adam",
                   spans_of(analysis, TraceKind::kOnDevice, origin_ns)};
  if (!device.spans.empty()) lanes.push_back(std::move(device));
  lanes.push_back(std::move(processor));
  lanes.push_back(std::move(pass_waits));
  for (TraceLane& lane : lanes) sort_spans(lane.spans);
  return lanes;
}

void join_spans(std::vector<LaneSpan>& spans, std::uint64_t apart_us) {
  if (apart_us == 0 || spans.empty()) return;
  std::size_t kept = 0;
  for (std::size_t i = 1; i < spans.size(); ++i) {
    LaneSpan& last = spans[kept];
    const std::uint64_t last_end_us = last.begin_us + last.length_us;
    const std::uint64_t end_us = spans[i].begin_us + spans[i].length_us;
    // Short ones of different units become one of none.
    const bool is_short = end_us - std::min(last.begin_us, end_us) < apart_us;
    const bool is_same = last.unit == spans[i].unit && last.subject == spans[i].subject;
    if (spans[i].begin_us >= last_end_us + apart_us || (!is_same && !is_short)) {
      spans[++kept] = spans[i];
      continue;
    }
    if (!is_same) last.unit = kTraceNone;
    last.length_us = std::max(last_end_us, end_us) - last.begin_us;
  }
  spans.resize(kept + 1);
}

std::string pack_spans(const std::vector<LaneSpan>& spans) {
  std::string raw;
  const auto add = [&raw](std::uint64_t value) {
    for (; value >= 128; value /= 128) raw += static_cast<char>(value % 128 + 128);
    raw += static_cast<char>(value);
  };
  std::uint64_t begin_us = 0;
  for (const LaneSpan& span : spans) {
    add(span.begin_us - begin_us);
    add(span.length_us);
    add(span.subject);
    add(span.unit == kTraceNone ? 0 : std::uint64_t{span.unit} + 1);
    begin_us = span.begin_us;
  }
  constexpr const char* kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (std::size_t i = 0; i < raw.size(); i += 3) {
    const auto byte = [&](std::size_t at) -> unsigned {
      return at < raw.size() ? static_cast<unsigned char>(raw[at]) : 0;
    };
    const unsigned three = byte(i) << 16 | byte(i + 1) << 8 | byte(i + 2);
    text += kDigits[three >> 18];
    text += kDigits[three >> 12 & 63];
    text += i + 1 < raw.size() ? kDigits[three >> 6 & 63] : '=';
    text += i + 2 < raw.size() ? kDigits[three & 63] : '=';
  }
  return text;
}

}  // namespace sluice
