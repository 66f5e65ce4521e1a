#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <sluice/units.h>
#include "tools/trace/trace_steps.h"
#include "tools/trace/trace_summary.h"

namespace sluice {
namespace {

double advised_seconds(std::uint64_t duration_ns) {
  return static_cast<double>(duration_ns) * 1e-9;
}

// The rate of all drives together while at least one of them was at work.
double storage_rate(const TraceAnalysis& analysis) {
  std::uint64_t size_bytes = 0;
  IntervalSet busy;
  for (const FlowStats& flow : analysis.flows()) {
    if (flow.kind == TraceKind::kRead || flow.kind == TraceKind::kWrite)
      size_bytes += flow.size_bytes;
  }
  for (std::size_t drive = 0; drive < analysis.drive_count(); ++drive) {
    for (const auto& [begin_ns, end_ns] : analysis.drive(drive).joined())
      busy.add(begin_ns, end_ns);
  }
  busy.seal();
  return busy.busy_ns() == 0 ? 0
                             : static_cast<double>(size_bytes) / advised_seconds(busy.busy_ns());
}

const FlowStats* stats_of(const TraceAnalysis& analysis, TraceKind kind) {
  const auto found = std::ranges::find(analysis.flows(), kind, &FlowStats::kind);
  return found == analysis.flows().end() ? nullptr : &*found;
}

// Parameters a second that the update goes at.
double adam_rate(const TraceAnalysis& analysis, const TracedEngine& engine) {
  std::uint64_t size_bytes = 0, busy_ns = 0;
  for (const TraceRecord& record : analysis.trace().records) {
    if (record.kind != TraceKind::kAdam) continue;
    size_bytes += record.size_bytes;
    busy_ns += record.end_ns - record.begin_ns;
  }
  if (busy_ns == 0 || engine.state_bytes_per_parameter <= 0) return 0;
  return static_cast<double>(size_bytes) / advised_seconds(busy_ns) /
         engine.state_bytes_per_parameter;
}

std::string collective_rates(const TraceAnalysis& analysis) {
  std::string rates;
  for (const FlowStats& flow : analysis.flows()) {
    if (flow.kind != TraceKind::kCollective) continue;
    rates += fmt::format("{}{} {:.2f} GB/s", rates.empty() ? "" : ", ", name_of(flow.key()),
                         flow.bytes_per_second() * 1e-9);
  }
  return rates.empty() ? "the slowest rank decides" : rates;
}

std::string adam_advice(double rate, double step_s, const TracedEngine& engine) {
  if (!engine.is_known) return "more cores, and run.threads for them";
  // Without updates, as where all steps were skipped, there is no rate; norms take time all the
  // same.
  const std::string now = (rate == 0 ? "" : fmt::format("{:.2f} Gparam/s ", rate * 1e-9)) +
                          fmt::format("on {} threads", engine.threads);
  if (engine.threads >= engine.granted_cores)
    return fmt::format(
        "{}, which is all cores that the run has: twice the cores would take up to "
        "{:.1f} ms off each step",
        now, step_s * 1e3 / 2);
  const std::uint64_t more = std::min<std::uint64_t>(2 * engine.threads, engine.granted_cores);
  return fmt::format(
      "{}: run.threads {}, of {} cores, would take up to {:.1f} ms off each step", now, more,
      engine.granted_cores,
      step_s * 1e3 * (1 - static_cast<double>(engine.threads) / static_cast<double>(more)));
}

// A budget, and the part of it that no pool takes: more of the budget helps only beyond that part.
struct Room {
  const char* key;
  const char* part;  // of the state, that has one home
  std::uint64_t unused_bytes;

  // A trace without its engine's description has neither sizes nor room.
  bool has(std::uint64_t size_bytes) const {
    return unused_bytes != 0 && size_bytes <= unused_bytes;
  }
  std::string more(std::uint64_t size_bytes) const {
    return fmt::format("{} +{}", key, format_bytes(size_bytes - unused_bytes));
  }
  std::string unused() const {
    return fmt::format("{} of {} are unused", format_bytes(unused_bytes), key);
  }
};

Room host_room(const TracedEngine& engine) {
  return {"memory.host", "block", engine.unused_host_bytes()};
}

Room device_room(const TracedEngine& engine) {
  return {"memory.device", "unit", engine.unused_device_bytes()};
}

// The keys by which the config keeps state on storage, whatever room the budgets have.
std::string homes_on_storage(const TracedEngine& engine) {
  std::string keys;
  for (const char* const key :
       {"placement.parameters", "placement.optimizer", "placement.gradients"}) {
    if (engine.setting(key) == "nvme") keys += (keys.empty() ? "" : " and ") + std::string(key);
  }
  return keys;
}

// The same for parameters, which the config keeps off the device.
std::string homes_off_device(const TracedEngine& engine) {
  const std::string place = engine.setting("placement.parameters");
  return place == "nvme" || place == "host" ? "placement.parameters" : "";
}

// State with its home in the room needs no buffers. Says how it gets there.
std::string home_advice(const Room& room, const std::string& keys, std::uint64_t size_bytes) {
  if (!room.has(size_bytes))
    return fmt::format("{}{} gives one more {} a home there", room.more(size_bytes),
                       keys.empty() ? "" : fmt::format(" with {} auto", keys), room.part);
  if (keys.empty()) return fmt::format("{}, so no budget is short", room.unused());
  return fmt::format("{}: with {} auto, state has its home there", room.unused(), keys);
}

std::string slot_advice(const Room& room, const std::string& keys, const char* name,
                        std::uint32_t slots, std::uint64_t slot_bytes) {
  if (room.has(slot_bytes)) return home_advice(room, keys, slot_bytes);
  return fmt::format("one more {} slot ({} -> {}) needs {}", name, slots, slots + 1,
                     room.more(slot_bytes));
}

std::string window_advice(const TracedEngine& engine) {
  const Room room = device_room(engine);
  const std::uint64_t unit_bytes = engine.largest_unit_bytes();
  const bool holds_all = engine.window_bytes != 0 && engine.window_bytes >= engine.all_unit_bytes();
  if (holds_all || room.has(unit_bytes))
    return home_advice(room, homes_off_device(engine), unit_bytes);
  return "one more unit in the window needs " + room.more(unit_bytes);
}

// More lanes than blocks on storage have nothing to read.
std::string lane_advice(const TracedEngine& engine) {
  const Room room = host_room(engine);
  const std::string keys = homes_on_storage(engine);
  const std::uint64_t blocks = engine.record_blocks_on_storage;
  const std::uint64_t lanes =
      blocks == 0 ? 2 * engine.lanes : std::min<std::uint64_t>(2 * engine.lanes, blocks);
  if (blocks != 0 && lanes <= engine.lanes)
    return fmt::format("each of the {} blocks on storage has a lane; {}", blocks,
                       home_advice(room, keys, engine.lane_bytes));
  const std::uint64_t more_bytes = (lanes - engine.lanes) * engine.lane_bytes;
  if (room.has(more_bytes) && !keys.empty()) return home_advice(room, keys, more_bytes);
  const std::string setting = fmt::format("optimizer.lanes {} -> {}", engine.lanes, lanes);
  if (room.has(more_bytes)) return fmt::format("{}, which {} fits into", room.unused(), setting);
  return fmt::format("{} needs {}", setting, room.more(more_bytes));
}

// More room for what is waited for by `reason`, so that it can begin sooner. The optimizer pass,
// whose reads go to its lanes, waits for no reason that a record has.
std::string buffer_advice(TraceReason reason, const TracedEngine& engine) {
  switch (reason) {
    case TraceReason::kSlot:
      return slot_advice(host_room(engine), homes_on_storage(engine), "parameter",
                         engine.parameter_slots, engine.parameter_slot_bytes);
    case TraceReason::kGradientSlot:
      return slot_advice(device_room(engine), "", "gradient", engine.gradient_slots,
                         engine.gradient_slot_bytes);
    case TraceReason::kActivation:
      if (engine.activation_bytes != 0 && device_room(engine).has(engine.activation_bytes))
        return home_advice(device_room(engine), "", engine.activation_bytes);
      return "memory.device + one activation is one more place for them";
    case TraceReason::kRead:
    case TraceReason::kWindow:
    case TraceReason::kCopy: return window_advice(engine);
    default: return lane_advice(engine);
  }
}

std::string bandwidth_advice(double rate, double step_s, const TracedEngine& engine) {
  // A byte of state in memory saves two on the drive: one read and one written.
  const auto more_bytes = static_cast<std::uint64_t>(step_s * rate / 2);
  const Room room = host_room(engine);
  const std::string keys = homes_on_storage(engine);
  const std::string moved = fmt::format("the drives moved {:.2f} GB/s", rate * 1e-9);
  if (!keys.empty() && room.has(more_bytes))
    return fmt::format("{}, and {}; a second drive halves the wait", moved,
                       home_advice(room, keys, more_bytes));
  return fmt::format(
      "{}; memory.host +{}{} keeps as much state off them as is waited for, a second drive halves "
      "it",
      moved, format_bytes(more_bytes), keys.empty() ? "" : fmt::format(" with {} auto", keys));
}

std::string copy_advice(double rate, const TracedEngine& engine) {
  const Room room = device_room(engine);
  const std::uint64_t unit_bytes = engine.largest_unit_bytes();
  const std::string keys = homes_off_device(engine);
  const std::string said =
      fmt::format("copies go at {:.2f} GB/s; units at home on the device need none", rate * 1e-9);
  if (room.has(unit_bytes)) return fmt::format("{}: {}", said, home_advice(room, keys, unit_bytes));
  return fmt::format("{}: {}{} for one more", said, room.more(unit_bytes),
                     keys.empty() ? "" : fmt::format(" with {} auto", keys));
}

// A share of the step that is worth a line about a setting.
constexpr double kWorthALine = 0.05;

std::optional<std::string> policy_advice(const TraceAnalysis& analysis,
                                         const TracedEngine& engine) {
  const StepMeans means = means_of(steady_steps(analysis));
  if (means.share_of_step(means.exposed_optimizer_s) < kWorthALine) return std::nullopt;
  const double wait_ms = 1e3 * means.exposed_optimizer_s;
  if (engine.policy == "serial")
    return fmt::format(
        "optimizer.overlap is serial: updates run between backward and the next step, which waits "
        "{:.1f} ms for them. With deferred they run beside the next forward",
        wait_ms);
  if (engine.policy == "deferred")
    return fmt::format(
        "optimizer.overlap is deferred: updates begin after backward, and each step waits {:.1f} "
        "ms "
        "for them. With speculative, or with eager (optimizer.clip_norm 0), they begin in backward",
        wait_ms);
  return std::nullopt;
}

// A queue of this depth keeps a drive busy.
constexpr std::uint32_t kDeepQueue = 8;

std::optional<std::string> depth_advice(const TraceAnalysis& analysis, const TracedEngine& engine) {
  if (engine.queue_depth == 0 || engine.queue_depth >= kDeepQueue) return std::nullopt;
  for (const FlowStats& flow : analysis.flows()) {
    const bool is_of_drive = flow.kind == TraceKind::kRead || flow.kind == TraceKind::kWrite;
    if (!is_of_drive || flow.queue.p50_ns < flow.device.p50_ns) continue;
    return fmt::format(
        "storage.queue_depth is {}: {} requests wait {:.2f} ms for their turn and take {:.2f} ms. "
        "With 32, the default, the drive works on more of them at once",
        engine.queue_depth, name_of(flow.key()), advised_seconds(flow.queue.p50_ns) * 1e3,
        advised_seconds(flow.device.p50_ns) * 1e3);
  }
  return std::nullopt;
}

// Computation or the end of one of these steps waited, and for a reason.
bool is_exposed(const Stall& stall, const std::vector<StepShare>& steps) {
  if (stall.is_of_pass || stall.cause == StallCause::kEngine ||
      stall.record->reason == TraceReason::kNone)
    return false;
  return place_of(*stall.record, steps).has_value();
}

}  // namespace

std::vector<StallGroup> group_stalls(const TraceAnalysis& analysis) {
  struct Sums {
    StallGroup group;
    std::map<TraceReason, std::uint64_t> by_reason;
    std::map<std::uint32_t, std::uint64_t> by_unit;
    std::map<std::uint32_t, std::pair<std::uint64_t, std::uint32_t>> longest;  // by unit: block
  };
  std::map<StallCause, Sums> groups;
  const std::vector<StepShare> steps = steady_steps(analysis);
  for (const Stall& stall : analysis.stalls()) {
    if (!is_exposed(stall, steps)) continue;
    Sums& sums = groups[stall.cause];
    ++sums.group.spans;
    sums.group.total_ns += stall.duration_ns();
    sums.by_reason[stall.record->reason] += stall.duration_ns();
    sums.by_unit[stall.record->unit] += stall.duration_ns();
    auto& longest = sums.longest[stall.record->unit];
    longest = std::max(longest, std::pair(stall.duration_ns(), stall.record->block));
  }
  const auto most = [](const auto& sums) {
    return std::ranges::max_element(sums, {}, [](const auto& item) { return item.second; })->first;
  };
  std::vector<StallGroup> list;
  for (auto& [key, sums] : groups) {
    sums.group.cause = key;
    sums.group.reason = most(sums.by_reason);
    sums.group.unit = most(sums.by_unit);
    sums.group.block = sums.longest[sums.group.unit].second;
    list.push_back(sums.group);
  }
  std::ranges::sort(list, std::greater(), &StallGroup::total_ns);
  return list;
}

std::vector<std::string> setting_advice(const TraceAnalysis& analysis, const TracedEngine& engine) {
  std::vector<std::string> lines;
  for (const auto& line : {policy_advice(analysis, engine), depth_advice(analysis, engine)}) {
    if (line) lines.push_back(*line);
  }
  return lines;
}

std::string advice_for(const StallGroup& group, const TraceAnalysis& analysis,
                       const TracedEngine& engine) {
  const double steps = std::max<double>(1, static_cast<double>(steady_steps(analysis).size()));
  const double step_s = advised_seconds(group.total_ns) / steps;
  switch (group.cause) {
    case StallCause::kBandwidth: return bandwidth_advice(storage_rate(analysis), step_s, engine);
    case StallCause::kLatePrefetch:
      return fmt::format("the drive was idle before, so reads could begin earlier: {}",
                         buffer_advice(group.reason, engine));
    case StallCause::kLatencyTail: {
      const FlowStats* const reads = stats_of(analysis, TraceKind::kRead);
      if (reads == nullptr) return "look at the drive (smartctl)";
      return fmt::format(
          "reads take {:.2f} ms, one in a thousand {:.2f} ms: look at the drive "
          "(smartctl), or ride it out: {}",
          advised_seconds(reads->device.p50_ns) * 1e3, advised_seconds(reads->device.p999_ns) * 1e3,
          buffer_advice(group.reason, engine));
    }
    case StallCause::kNoBuffer: return buffer_advice(group.reason, engine);
    case StallCause::kCopyLink: {
      const FlowStats* const copies = stats_of(analysis, TraceKind::kCopyToDevice);
      if (copies == nullptr || copies->bytes_per_second() == 0) return {};
      return copy_advice(copies->bytes_per_second(), engine);
    }
    case StallCause::kAdam: return adam_advice(adam_rate(analysis, engine), step_s, engine);
    case StallCause::kChecksum:
      return fmt::format(
          "storage.verify sample checks one block in eight: up to {:.1f} ms less per "
          "step",
          step_s * 1e3 * 7 / 8);
    case StallCause::kCollective:
      return fmt::format(
          "{}; the summary of all ranks' files together says whom the others wait for",
          collective_rates(analysis));
    case StallCause::kCommit:
      return "a larger storage.state.commit_every makes commits rarer; a drive whose flush is "
             "quicker makes them shorter";
    case StallCause::kSave: return "write checkpoints to a quicker drive, or fewer of them";
    case StallCause::kAnnounce:
      return "announce the units of several layers at once, as backward can: each call is a vote";
    case StallCause::kSchedule: return "declare the order of units that steps have";
    case StallCause::kEngine: break;
  }
  return {};
}

}  // namespace sluice
