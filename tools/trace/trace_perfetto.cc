#include "tools/trace/trace_perfetto.h"

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "tools/trace/trace_engine.h"

namespace sluice {
namespace {

// Fields by their numbers in Perfetto's descriptions (protos/perfetto/trace).
constexpr std::uint32_t kTracePacket = 1;
constexpr std::uint32_t kPacketTimestamp = 8, kPacketSequence = 10, kPacketEvent = 11,
                        kPacketFlags = 13, kPacketTrack = 60;
constexpr std::uint64_t kStateCleared = 1;
constexpr std::uint32_t kTrackUuid = 1, kTrackName = 2, kTrackProcess = 3, kTrackParent = 5,
                        kTrackCounter = 8;
constexpr std::uint32_t kProcessPid = 1, kProcessName = 6;
constexpr std::uint32_t kEventAnnotation = 4, kEventType = 9, kEventTrack = 11, kEventCategory = 22,
                        kEventName = 23, kEventCounter = 30;
constexpr std::uint64_t kSliceBegin = 1, kSliceEnd = 2, kCounter = 4;
constexpr std::uint32_t kAnnotationInt = 4, kAnnotationText = 6, kAnnotationName = 10;

// A message of protobuf: varints and bytes are all that these descriptions need.
class ProtoMessage {
 public:
  ProtoMessage& number(std::uint32_t field, std::uint64_t value) {
    varint(std::uint64_t{field} << 3);
    varint(value);
    return *this;
  }
  ProtoMessage& bytes(std::uint32_t field, std::string_view value) {
    varint(std::uint64_t{field} << 3 | 2);
    varint(value.size());
    text_ += value;
    return *this;
  }
  ProtoMessage& message(std::uint32_t field, const ProtoMessage& value) {
    return bytes(field, value.text_);
  }
  const std::string& text() const { return text_; }

 private:
  void varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) text_ += static_cast<char>(value | 0x80);
    text_ += static_cast<char>(value);
  }

  std::string text_;
};

// A slice that waits for its track.
struct Slice {
  std::uint64_t begin_ns = 0;
  std::uint64_t end_ns = 0;
  std::uint32_t unit = kTraceNone;
  std::string row;
  std::string name;
  ProtoMessage annotations;  // fields of the event
};

ProtoMessage annotation(std::string_view name, std::uint64_t value) {
  return ProtoMessage().bytes(kAnnotationName, name).number(kAnnotationInt, value);
}

ProtoMessage annotation(std::string_view name, std::string_view value) {
  return ProtoMessage().bytes(kAnnotationName, name).bytes(kAnnotationText, value);
}

std::string row_of(TraceKind kind) {
  switch (kind) {
    case TraceKind::kCompute: return "computation";
    case TraceKind::kRead:
    case TraceKind::kWrite:
    case TraceKind::kFlush: return "storage";
    case TraceKind::kCopyToDevice:
    case TraceKind::kCopyToHost: return "copies";
    case TraceKind::kAdam:
    case TraceKind::kAccumulate:
    case TraceKind::kNorm: return "optimizer";
    default: return std::string(name_of(kind));
  }
}

class PerfettoWriter {
 public:
  explicit PerfettoWriter(OutputFile& file) : file_(file) {
    packet(ProtoMessage().number(kPacketFlags, kStateCleared));
  }

  void write(const TraceAnalysis& rank) {
    engine_ = engine_of(rank.trace());
    units_.clear();
    lanes_.clear();
    // Perfetto takes process 0 for the idle one.
    process_ = track(ProtoMessage().message(
        kTrackProcess, ProtoMessage()
                           .number(kProcessPid, rank.trace().rank + 1)
                           .bytes(kProcessName, fmt::format("rank {}", rank.trace().rank))));
    std::vector<Slice> slices = slices_of(rank);
    std::ranges::stable_sort(slices, {}, &Slice::begin_ns);
    for (const Slice& slice : slices) write_slice(slice);
    write_depths(rank);
  }

 private:
  struct TrackLane {
    std::uint64_t uuid = 0;
    std::uint64_t free_ns = 0;
  };

  void packet(ProtoMessage content) {
    content.number(kPacketSequence, 1);
    file_.print("{}", ProtoMessage().message(kTracePacket, content).text());
  }
  std::uint64_t track(ProtoMessage description) {
    packet(ProtoMessage().message(kPacketTrack, description.number(kTrackUuid, ++uuids_)));
    return uuids_;
  }
  std::uint64_t track_below(std::uint64_t parent, std::string_view name) {
    return track(ProtoMessage().number(kTrackParent, parent).bytes(kTrackName, name));
  }
  void event(std::uint64_t time_ns, const ProtoMessage& of) {
    packet(ProtoMessage().number(kPacketTimestamp, time_ns).message(kPacketEvent, of));
  }

  std::vector<Slice> slices_of(const TraceAnalysis& rank) const {
    std::vector<Slice> slices;
    for (const TraceRecord& record : rank.trace().records) {
      // The analysis has the waits, with their causes.
      if (record.kind == TraceKind::kWait || record.end_ns < record.begin_ns) continue;
      Slice slice{.begin_ns = record.begin_ns,
                  .end_ns = record.end_ns,
                  .unit = record.unit,
                  .row = row_of(record.kind),
                  .name = span_name(record, engine_.unit_name(record.unit)),
                  .annotations = {}};
      slice.annotations.message(kEventAnnotation, annotation("step", record.step));
      if (record.block != kTraceNone)
        slice.annotations.message(kEventAnnotation,
                                  annotation("block", std::uint64_t{record.block}));
      if (record.size_bytes != 0 && record.kind != TraceKind::kStep)
        slice.annotations.message(kEventAnnotation, annotation("bytes", record.size_bytes));
      if (record.kind <= TraceKind::kWrite)
        slice.annotations.message(kEventAnnotation,
                                  annotation("drive", std::uint64_t{record.lane}));
      slices.push_back(std::move(slice));
    }
    for (const Stall& stall : rank.stalls()) {
      ProtoMessage annotations;
      annotations.message(kEventAnnotation, annotation("for", name_of(stall.record->reason)));
      annotations.message(kEventAnnotation, annotation("step", stall.record->step));
      if (stall.record->block != kTraceNone)
        annotations.message(kEventAnnotation,
                            annotation("block", std::uint64_t{stall.record->block}));
      slices.push_back({.begin_ns = stall.begin_ns,
                        .end_ns = stall.end_ns,
                        .unit = stall.record->unit,
                        .row = stall.is_of_pass ? "waits of the pass" : "waits",
                        .name = std::string(name_of(stall.cause)),
                        .annotations = std::move(annotations)});
    }
    return slices;
  }

  std::uint64_t parent_of(std::uint32_t unit) {
    if (unit == kTraceNone) return process_;
    std::uint64_t& uuid = units_[unit];
    if (uuid == 0) uuid = track_below(process_, "unit " + engine_.unit_name(unit));
    return uuid;
  }

  // Slices of a track must not overlap: each takes the first track of its row that is free.
  std::uint64_t lane_for(const Slice& slice) {
    std::vector<TrackLane>& lanes = lanes_[{slice.unit, slice.row}];
    auto lane = std::ranges::find_if(
        lanes, [&](const TrackLane& one) { return one.free_ns <= slice.begin_ns; });
    if (lane == lanes.end())
      lane = lanes.insert(lane, {.uuid = track_below(parent_of(slice.unit), slice.row)});
    lane->free_ns = slice.end_ns;
    return lane->uuid;
  }

  void write_slice(const Slice& slice) {
    const std::uint64_t lane = lane_for(slice);
    ProtoMessage begin = slice.annotations;
    event(slice.begin_ns, begin.number(kEventType, kSliceBegin)
                              .number(kEventTrack, lane)
                              .bytes(kEventCategory, slice.row)
                              .bytes(kEventName, slice.name));
    event(slice.end_ns, ProtoMessage().number(kEventType, kSliceEnd).number(kEventTrack, lane));
  }

  void write_depths(const TraceAnalysis& rank) {
    std::map<std::uint32_t, std::map<std::uint64_t, std::int64_t>> changes;  // by drive and time
    for (const TraceRecord& record : rank.trace().records) {
      if (record.kind > TraceKind::kWrite) continue;
      ++changes[record.lane][record.started_ns];
      --changes[record.lane][record.moved_ns];
    }
    for (const auto& [drive, depths] : changes) {
      const std::uint64_t uuid = track(ProtoMessage()
                                           .number(kTrackParent, process_)
                                           .bytes(kTrackName, fmt::format("drive {} depth", drive))
                                           .bytes(kTrackCounter, ""));
      std::int64_t depth = 0;
      for (const auto& [time_ns, change] : depths) {
        depth += change;
        event(time_ns, ProtoMessage()
                           .number(kEventType, kCounter)
                           .number(kEventTrack, uuid)
                           .number(kEventCounter, static_cast<std::uint64_t>(depth)));
      }
    }
  }

  OutputFile& file_;
  std::uint64_t uuids_ = 0;
  TracedEngine engine_;
  std::uint64_t process_ = 0;
  std::map<std::uint32_t, std::uint64_t> units_;
  std::map<std::pair<std::uint32_t, std::string>, std::vector<TrackLane>> lanes_;
};

}  // namespace

void write_perfetto(OutputFile& file, const std::vector<TraceAnalysis>& ranks) {
  PerfettoWriter writer(file);
  for (const TraceAnalysis& rank : ranks) writer.write(rank);
}

}  // namespace sluice
