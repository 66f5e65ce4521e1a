#include "tools/trace/trace_export.h"

#include <algorithm>
#include <map>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tools/trace/trace_engine.h"

namespace sluice {
namespace {

constexpr std::uint64_t kCounterBinNs = 1'000'000;
constexpr std::uint64_t kArrivalNs = 1000;

std::string quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

double us(std::uint64_t time_ns) {
  return static_cast<double>(time_ns) * 1e-3;
}

// Threads of a rank's process.
enum Track : std::uint32_t { kSteps = 1, kComputeTrack, kWaits, kProcessor, kPassWaits, kArrivals };

class ChromeWriter {
 public:
  explicit ChromeWriter(OutputFile& file) : file_(file) {
    file_.print("{{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n");
  }
  void finish() { file_.print("\n]}}\n"); }
  ChromeWriter(const ChromeWriter&) = delete;
  ChromeWriter& operator=(const ChromeWriter&) = delete;

  void write(const TraceAnalysis& rank) {
    rank_ = rank.trace().rank;
    engine_ = engine_of(rank.trace());
    name_tracks();
    for (const TraceRecord& record : rank.trace().records) write_record(record);
    for (const Stall& stall : rank.stalls()) {
      slice(stall.is_of_pass ? kPassWaits : kWaits, stall.begin_ns, stall.end_ns,
            std::string(name_of(stall.cause)),
            fmt::format("\"unit\": {}, \"for\": \"{}\"",
                        quoted(engine_.unit_name(stall.record->unit)),
                        name_of(stall.record->reason)));
    }
    write_flows(rank);
    write_counters(rank);
  }

 private:
  void event(const std::string& fields) {
    file_.print("{}{{\"pid\": {}, {}}}", is_first_ ? "" : ",\n", rank_, fields);
    is_first_ = false;
  }
  void slice(std::uint32_t track, std::uint64_t begin_ns, std::uint64_t end_ns,
             const std::string& name, const std::string& arguments) {
    event(
        fmt::format("\"ph\": \"X\", \"tid\": {}, \"ts\": {:.3f}, \"dur\": {:.3f}, \"name\": {}, "
                    "\"args\": {{{}}}",
                    track, us(begin_ns), us(end_ns - begin_ns), quoted(name), arguments));
  }

  void name_tracks() {
    event(fmt::format(
        "\"ph\": \"M\", \"name\": \"process_name\", \"args\": {{\"name\": \"rank {}\"}}", rank_));
    constexpr std::pair<std::uint32_t, const char*> kNames[] = {
        {kSteps, "steps"},           {kComputeTrack, "compute"},        {kWaits, "waits"},
        {kProcessor, "Adam, norms"}, {kPassWaits, "waits of the pass"}, {kArrivals, "arrivals"}};
    for (const auto& [track, name] : kNames)
      event(
          fmt::format("\"ph\": \"M\", \"tid\": {}, \"name\": \"thread_name\", \"args\": "
                      "{{\"name\": \"{}\"}}",
                      track, name));
  }

  void write_record(const TraceRecord& record) {
    const std::string unit = engine_.unit_name(record.unit);
    const std::string arguments =
        fmt::format("\"unit\": {}, \"block\": {}, \"bytes\": {}, \"step\": {}", quoted(unit),
                    static_cast<std::int32_t>(record.block), record.size_bytes, record.step);
    const std::string name = span_name(record, unit);
    const auto slice_on = [&](std::uint32_t track) {
      slice(track, record.begin_ns, record.end_ns, name, arguments);
    };
    switch (record.kind) {
      case TraceKind::kStep: return slice_on(kSteps);
      case TraceKind::kCompute: return slice_on(kComputeTrack);
      case TraceKind::kAdam:
      case TraceKind::kAccumulate:
      case TraceKind::kNorm: return slice_on(kProcessor);
      case TraceKind::kRead:
      case TraceKind::kWrite:
      case TraceKind::kFlush:
        return async(record, fmt::format("drive {}", record.lane), name, arguments);
      case TraceKind::kCopyToDevice:
      case TraceKind::kCopyToHost:
      case TraceKind::kLane:
      case TraceKind::kResident:
      case TraceKind::kCollective:
      case TraceKind::kOnDevice:
        return async(record, std::string(name_of(record.kind)), name, arguments);
      default: return;
    }
  }

  // Events that overlap: queue time and the rest in one, the drive's own part nested in it.
  void async(const TraceRecord& record, const std::string& category, const std::string& name,
             const std::string& arguments) {
    const std::uint64_t id = ++async_ids_;
    const auto point = [&](const char* phase, std::uint64_t time_ns, const std::string& of,
                           const std::string& with) {
      event(
          fmt::format("\"ph\": \"{}\", \"cat\": {}, \"id\": {}, \"ts\": {:.3f}, \"name\": {}, "
                      "\"args\": {{{}}}",
                      phase, quoted(category), id, us(time_ns), quoted(of), with));
    };
    point("b", record.begin_ns, name, arguments);
    if (record.started_ns > record.begin_ns && record.moved_ns >= record.started_ns &&
        record.moved_ns <= record.end_ns) {
      point("b", record.started_ns, "moved", "");
      point("e", record.moved_ns, "moved", "");
    }
    point("e", record.end_ns, name, "");
  }

  // From each read of parameters to the next computation of its unit. Arrows begin and end in
  // slices; those of arrivals are short, and one ends before the next begins.
  void write_flows(const TraceAnalysis& rank) {
    std::map<std::uint32_t, std::vector<const TraceRecord*>> uses;
    std::vector<const TraceRecord*> reads;
    for (const TraceRecord& record : rank.trace().records) {
      if (record.kind == TraceKind::kCompute && record.end_ns > record.begin_ns)
        uses[record.unit].push_back(&record);
      if (record.kind == TraceKind::kRead && record.detail == kTraceParameters)
        reads.push_back(&record);
    }
    for (auto& [unit, list] : uses) std::ranges::sort(list, {}, &TraceRecord::begin_ns);
    std::ranges::sort(reads, {}, &TraceRecord::end_ns);
    std::uint64_t free_ns = 0;  // from when on the track is
    for (std::size_t i = 0; i < reads.size(); ++i) {
      const std::uint64_t begin_ns = std::max(reads[i]->end_ns, free_ns);
      const auto& list = uses[reads[i]->unit];
      const auto use = std::ranges::lower_bound(list, begin_ns, {}, &TraceRecord::begin_ns);
      if (use == list.end()) continue;
      free_ns = begin_ns + kArrivalNs;
      if (i + 1 < reads.size())
        free_ns = std::max(begin_ns + 1, std::min(free_ns, reads[i + 1]->end_ns));
      slice(kArrivals, begin_ns, free_ns, engine_.unit_name(reads[i]->unit), "");
      const std::uint64_t id = ++flow_ids_;
      flow_end("s", id, kArrivals, begin_ns);
      flow_end("f", id, kComputeTrack, (*use)->begin_ns);
    }
  }
  void flow_end(const char* phase, std::uint64_t id, std::uint32_t track, std::uint64_t time_ns) {
    event(fmt::format(
        "\"ph\": \"{}\", \"bp\": \"e\", \"cat\": \"use\", \"name\": \"use\", \"id\": {}, "
        "\"tid\": {}, \"ts\": {:.3f}",
        phase, id, track, us(time_ns)));
  }

  void write_counters(const TraceAnalysis& rank) {
    struct Drive {
      std::map<std::uint64_t, std::int64_t> depth;   // changes
      std::map<std::uint64_t, std::uint64_t> bytes;  // by bin of their end
    };
    std::map<std::uint32_t, Drive> drives;
    for (const TraceRecord& record : rank.trace().records) {
      if (record.kind > TraceKind::kWrite) continue;
      Drive& drive = drives[record.lane];
      ++drive.depth[record.started_ns];
      --drive.depth[record.moved_ns];
      drive.bytes[record.moved_ns / kCounterBinNs * kCounterBinNs] += record.size_bytes;
    }
    for (const auto& [number, drive] : drives) {
      const auto counter = [&, of = number](std::uint64_t time_ns, const char* what, double value) {
        event(
            fmt::format("\"ph\": \"C\", \"name\": \"drive {} {}\", \"ts\": {:.3f}, \"args\": "
                        "{{\"value\": {:.6g}}}",
                        of, what, us(time_ns), value));
      };
      std::int64_t depth = 0;
      for (const auto& [time_ns, change] : drive.depth)
        counter(time_ns, "depth", static_cast<double>(depth += change));
      std::uint64_t last_ns = 0;
      for (const auto& [time_ns, size_bytes] : drive.bytes) {
        if (last_ns != 0 && time_ns != last_ns + kCounterBinNs)
          counter(last_ns + kCounterBinNs, "GB/s", 0);
        counter(time_ns, "GB/s",
                static_cast<double>(size_bytes) / static_cast<double>(kCounterBinNs));
        last_ns = time_ns;
      }
    }
  }

  OutputFile& file_;
  bool is_first_ = true;
  std::uint32_t rank_ = 0;
  TracedEngine engine_;
  std::uint64_t async_ids_ = 0;
  std::uint64_t flow_ids_ = 0;
};

// -1 for none, as is usual in tables.
std::int64_t number_of(std::uint32_t index) {
  return index == kTraceNone ? -1 : std::int64_t{index};
}

}  // namespace

void write_chrome(OutputFile& file, const std::vector<TraceAnalysis>& ranks) {
  ChromeWriter writer(file);
  for (const TraceAnalysis& rank : ranks) writer.write(rank);
  writer.finish();
}

void write_csv(OutputFile& file, const std::vector<TraceAnalysis>& ranks) {
  file.print(
      "rank,kind,step,unit,unit_name,block,use,reason,lane,detail,begin_ns,started_ns,"
      "moved_ns,end_ns,size_bytes\n");
  for (const TraceAnalysis& rank : ranks) {
    const TracedEngine engine = engine_of(rank.trace());
    for (const TraceRecord& record : rank.trace().records) {
      std::string name = engine.unit_name(record.unit);
      for (std::size_t at = 0; (at = name.find('"', at)) != std::string::npos; at += 2)
        name.insert(at, 1, '"');
      file.print("{},{},{},{},\"{}\",{},{},{},{},{},{},{},{},{},{}\n", rank.trace().rank,
                 name_of(record.kind), record.step, number_of(record.unit), name,
                 number_of(record.block), number_of(record.use), name_of(record.reason),
                 record.lane, record.detail, record.begin_ns, record.started_ns, record.moved_ns,
                 record.end_ns, record.size_bytes);
    }
  }
}

void write_json(OutputFile& file, const std::vector<TraceAnalysis>& ranks) {
  file.print("{{\"ranks\": [");
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const TraceFile& trace = ranks[i].trace();
    const auto section = trace.sections.find("engine");
    const bool is_sound =
        section != trace.sections.end() && nlohmann::json::accept(section->second);
    const std::string clock = trace.clock_offset_ns
                                  ? fmt::format("{{\"offset_ns\": {}, \"error_ns\": {}}}",
                                                *trace.clock_offset_ns, trace.clock_error_ns)
                                  : "null";
    file.print(
        "{}\n{{\"rank\": {}, \"lost\": {}, \"clock\": {}, \"open_step\": {}, \"engine\": {}, "
        "\"steps\": [",
        i == 0 ? "" : ",", trace.rank, trace.lost, clock,
        trace.open_step == 0 ? "null" : std::to_string(trace.open_step),
        is_sound ? section->second : "null");
    const char* comma = "";
    for (const StepShare& step : ranks[i].steps()) {
      file.print(
          "{}\n{{\"step\": {}, \"begin_ns\": {}, \"end_ns\": {}, \"compute_ns\": {}, "
          "\"exposed_io_ns\": {}, \"exposed_optimizer_ns\": {}, \"other_ns\": {}, "
          "\"background_ns\": {}, \"drained_ns\": {}, \"is_open\": {}}}",
          comma, step.step, step.begin_ns, step.end_ns, step.compute_ns, step.exposed_io_ns,
          step.exposed_optimizer_ns, step.other_ns, step.background_ns, step.drained_ns,
          step.is_open);
      comma = ",";
    }
    file.print("], \"stalls\": [");
    comma = "";
    for (const Stall& stall : ranks[i].stalls()) {
      file.print(
          "{}\n{{\"cause\": \"{}\", \"reason\": \"{}\", \"of_pass\": {}, \"step\": {}, \"unit\": "
          "{}, "
          "\"block\": {}, \"begin_ns\": {}, \"end_ns\": {}}}",
          comma, name_of(stall.cause), name_of(stall.record->reason), stall.is_of_pass,
          stall.record->step, number_of(stall.record->unit), number_of(stall.record->block),
          stall.begin_ns, stall.end_ns);
      comma = ",";
    }
    file.print("], \"records\": [");
    comma = "";
    for (const TraceRecord& record : trace.records) {
      file.print(
          "{}\n{{\"kind\": \"{}\", \"step\": {}, \"unit\": {}, \"block\": {}, \"use\": {}, "
          "\"reason\": \"{}\", \"lane\": {}, \"detail\": {}, \"begin_ns\": {}, "
          "\"started_ns\": {}, \"moved_ns\": {}, \"end_ns\": {}, \"size_bytes\": {}}}",
          comma, name_of(record.kind), record.step, number_of(record.unit), number_of(record.block),
          number_of(record.use), name_of(record.reason), record.lane, record.detail,
          record.begin_ns, record.started_ns, record.moved_ns, record.end_ns, record.size_bytes);
      comma = ",";
    }
    file.print("]}}");
  }
  file.print("]}}\n");
}

}  // namespace sluice
