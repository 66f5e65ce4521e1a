// The part of the analysis that finds the cause of every wait. docs/tracing.md has the same rules
// for users.
#include <algorithm>

#include "engine/run/step_timeline.h"
#include "tools/trace/trace_analysis.h"

namespace sluice {
namespace {

// A resource that was at work for more than this share of a wait is its cause.
constexpr double kBusyFrom = 0.5;
// A transfer that took the drive this many times as long as most is in its tail.
constexpr std::uint64_t kTailTimes = 4;
// Fewer requests than this at once: more buffers would have kept the drive busier.
constexpr double kDeepEnough = 2;
// Less time between two updates of blocks has no cause.
constexpr std::uint64_t kPassGapNs = 20'000;

std::uint64_t overlap_ns(std::uint64_t begin_a, std::uint64_t end_a, std::uint64_t begin_b,
                         std::uint64_t end_b) {
  const std::uint64_t begin = std::max(begin_a, begin_b);
  const std::uint64_t end = std::min(end_a, end_b);
  return end <= begin ? 0 : end - begin;
}

// A wait between steps, for the rest of an update.
bool is_after_step(const TraceRecord& record) {
  return record.kind == TraceKind::kWait && record.detail == kTraceAfterStep &&
         record.reason != TraceReason::kNone;
}

// The last step that began before the record.
std::optional<std::size_t> last_before(const TraceRecord& record,
                                       const std::vector<StepShare>& steps) {
  const auto after = std::ranges::upper_bound(steps, record.begin_ns, {}, &StepShare::begin_ns);
  if (after == steps.begin()) return std::nullopt;
  return static_cast<std::size_t>(after - steps.begin()) - 1;
}

}  // namespace

// The last record under `key` that overlaps the stretch.
const TraceRecord* TraceAnalysis::find(const Index& index, std::uint64_t key,
                                       std::uint64_t begin_ns, std::uint64_t end_ns) const {
  const auto found = index.find(key);
  if (found == index.end()) return nullptr;
  const auto& records = found->second;
  auto after = std::ranges::lower_bound(records, end_ns, {},
                                        [](const TraceRecord* record) { return record->begin_ns; });
  while (after != records.begin()) {
    const TraceRecord* const record = *--after;
    if (record->end_ns > begin_ns) return record;
    // A block is read once at a time: an earlier read has ended before this one began.
    return nullptr;
  }
  return nullptr;
}

void TraceAnalysis::judge_waits() {
  for (const TraceRecord& record : trace_.records) {
    if (record.kind != TraceKind::kWait) continue;
    stalls_.push_back({.record = &record,
                       .begin_ns = record.begin_ns,
                       .end_ns = record.end_ns,
                       .cause = cause_of_wait(record)});
  }
}

StallCause TraceAnalysis::cause_of_wait(const TraceRecord& wait) const {
  const std::uint64_t begin = wait.begin_ns, end = wait.end_ns;
  switch (wait.reason) {
    case TraceReason::kNone: return StallCause::kEngine;
    case TraceReason::kRead: return cause_of_read(wait.block, kTraceParameters, begin, end);
    case TraceReason::kSlot: return cause_of_slot(begin, end);
    case TraceReason::kWindow: return StallCause::kNoBuffer;
    case TraceReason::kCopy: return cause_of_copy(wait.unit, begin, end);
    case TraceReason::kGradientSlot:
      if (link_down_.share(begin, end) > kBusyFrom) return StallCause::kCopyLink;
      return processor_.share(begin, end) > kBusyFrom ? StallCause::kAdam : StallCause::kNoBuffer;
    case TraceReason::kUpdateRead: return cause_of_update_read(wait.block, begin, end);
    case TraceReason::kUpdateLane: return cause_by_use(begin, end);
    case TraceReason::kUpdateWrite:
    case TraceReason::kGradientSpill:
      return requests_.share(begin, end) > kBusyFrom ? StallCause::kBandwidth : StallCause::kEngine;
    case TraceReason::kUpdate:
      // The device updates the block, which first has to come there.
      if (streams_updates_ && processor_.share(begin, end) <= kBusyFrom)
        return StallCause::kCopyLink;
      return StallCause::kAdam;
    case TraceReason::kNorm: return StallCause::kAdam;
    case TraceReason::kGradientCopy: return StallCause::kCopyLink;
    case TraceReason::kCollective: return StallCause::kCollective;
    case TraceReason::kSchedule: return StallCause::kSchedule;
    case TraceReason::kCommit: return StallCause::kCommit;
    case TraceReason::kSave: return StallCause::kSave;
    case TraceReason::kAnnounce: return StallCause::kAnnounce;
    case TraceReason::kActivation: return cause_of_activation(wait.unit, begin, end);
  }
  return StallCause::kEngine;
}

// A read that was waited for: in its checksum; at a drive that took far longer than usual; or
// behind others, for the whole wait. Otherwise the drive's work before it tells: an idle drive
// could have begun sooner, and one with little to do at a time could have had more with more
// buffers.
StallCause TraceAnalysis::cause_of_read(std::uint32_t block, std::uint8_t plane,
                                        std::uint64_t begin_ns, std::uint64_t end_ns) const {
  const TraceRecord* const read = find(reads_, read_key(block, plane), begin_ns, end_ns);
  if (read == nullptr) return cause_by_use(begin_ns, end_ns);
  const std::uint64_t wait_ns = end_ns - begin_ns;
  const auto dominates = [&](std::uint64_t from_ns, std::uint64_t to_ns) {
    return 2 * overlap_ns(begin_ns, end_ns, from_ns, to_ns) > wait_ns;
  };
  if (dominates(read->moved_ns, read->end_ns)) return StallCause::kChecksum;
  const std::uint64_t usual_ns = median_read_ns_[std::min<std::size_t>(plane, 3)];
  if (dominates(read->started_ns, read->moved_ns) &&
      read->moved_ns - read->started_ns > kTailTimes * usual_ns)
    return StallCause::kLatencyTail;
  const IntervalSet& drive = drives_[read->lane];
  if (read->started_ns - std::min(read->begin_ns, read->started_ns) >= wait_ns)
    return drive.share(read->begin_ns, read->started_ns) > kBusyFrom ? StallCause::kBandwidth
                                                                     : StallCause::kLatencyTail;
  const std::uint64_t sooner_ns = read->begin_ns - std::min(read->begin_ns, wait_ns);
  if (drive.share(sooner_ns, read->begin_ns) <= kBusyFrom) return StallCause::kLatePrefetch;
  return requests_.depth(sooner_ns, read->begin_ns) >= kDeepEnough ? StallCause::kBandwidth
                                                                   : StallCause::kNoBuffer;
}

// An activation that is read back is like parameters. Otherwise it is on the link, or the one in
// its place in the window leaves too slowly: over the link, or to the drive.
StallCause TraceAnalysis::cause_of_activation(std::uint32_t unit, std::uint64_t begin_ns,
                                              std::uint64_t end_ns) const {
  if (find(reads_, read_key(unit, kTraceActivations), begin_ns, end_ns) != nullptr)
    return cause_of_read(unit, kTraceActivations, begin_ns, end_ns);
  if (link_up_.share(begin_ns, end_ns) > kBusyFrom ||
      link_down_.share(begin_ns, end_ns) > kBusyFrom)
    return StallCause::kCopyLink;
  return requests_.depth(begin_ns, end_ns) >= kDeepEnough ? StallCause::kBandwidth
                                                          : StallCause::kNoBuffer;
}

// The block's state comes in two parts; the wait was for the one that came last.
StallCause TraceAnalysis::cause_of_update_read(std::uint32_t block, std::uint64_t begin_ns,
                                               std::uint64_t end_ns) const {
  const TraceRecord* last = nullptr;
  for (const std::uint8_t plane : {kTraceParameters, kTraceOptimizerState}) {
    const TraceRecord* const read = find(reads_, read_key(block, plane), begin_ns, end_ns);
    if (read != nullptr && (last == nullptr || read->end_ns > last->end_ns)) last = read;
  }
  if (last == nullptr) return cause_by_use(begin_ns, end_ns);
  return cause_of_read(block, last->detail, begin_ns, end_ns);
}

// Only the work at that time is known. One lane alone has two reads under way.
StallCause TraceAnalysis::cause_by_use(std::uint64_t begin_ns, std::uint64_t end_ns) const {
  const double storage = requests_.share(begin_ns, end_ns);
  const double processor = processor_.share(begin_ns, end_ns);
  if (processor > kBusyFrom && processor >= storage) return StallCause::kAdam;
  return requests_.depth(begin_ns, end_ns) > kDeepEnough ? StallCause::kBandwidth
                                                         : StallCause::kNoBuffer;
}

StallCause TraceAnalysis::cause_of_slot(std::uint64_t begin_ns, std::uint64_t end_ns) const {
  if (link_up_.share(begin_ns, end_ns) > kBusyFrom) return StallCause::kCopyLink;
  return requests_.depth(begin_ns, end_ns) >= kDeepEnough ? StallCause::kBandwidth
                                                          : StallCause::kNoBuffer;
}

// A copy that was queued for the whole wait, while the link had nothing else to do, could not
// begin: computation had not left the place in the window.
StallCause TraceAnalysis::cause_of_copy(std::uint32_t unit, std::uint64_t begin_ns,
                                        std::uint64_t end_ns) const {
  const TraceRecord* const copy = find(copies_, unit, begin_ns, end_ns);
  if (copy == nullptr) return StallCause::kEngine;
  const std::uint64_t wait_ns = end_ns - begin_ns;
  const bool was_queued = copy->started_ns - std::min(copy->begin_ns, copy->started_ns) >= wait_ns;
  const std::uint64_t sooner_ns = copy->started_ns - std::min(copy->started_ns, wait_ns);
  const bool link_was_idle = link_up_.share(sooner_ns, copy->started_ns) <= kBusyFrom;
  return was_queued && link_was_idle ? StallCause::kNoBuffer : StallCause::kCopyLink;
}

// The pass waits between two updates. Waits for gradients do not count, since the pass cannot bring
// them.
void TraceAnalysis::judge_pass() {
  std::vector<const TraceRecord*> updates;
  for (const TraceRecord& record : trace_.records) {
    if (record.kind == TraceKind::kAdam) updates.push_back(&record);
  }
  std::ranges::sort(updates, {}, [](const TraceRecord* record) { return record->begin_ns; });
  for (std::size_t i = 1; i < updates.size(); ++i) {
    const TraceRecord& update = *updates[i];
    const std::uint64_t begin_ns = updates[i - 1]->end_ns, end_ns = update.begin_ns;
    if (update.step != updates[i - 1]->step || end_ns < begin_ns + kPassGapNs) continue;
    if (processor_.share(begin_ns, end_ns) > kBusyFrom) continue;
    const TraceRecord* const lane = find(lanes_, update.block, begin_ns, end_ns);
    if (lane == nullptr) continue;
    std::uint64_t loaded_ns = lane->begin_ns;
    for (const std::uint8_t plane : {kTraceParameters, kTraceOptimizerState}) {
      const TraceRecord* const read =
          find(reads_, read_key(update.block, plane), lane->begin_ns, end_ns);
      if (read != nullptr) loaded_ns = std::max(loaded_ns, std::min(read->end_ns, end_ns));
    }
    if (loaded_ns <= begin_ns) continue;  // it had all but its gradient
    const StallCause cause = lane->begin_ns == loaded_ns
                                 ? cause_by_use(begin_ns, loaded_ns)
                                 : cause_of_update_read(update.block, begin_ns, loaded_ns);
    stalls_.push_back({.record = &update,
                       .begin_ns = begin_ns,
                       .end_ns = loaded_ns,
                       .cause = cause,
                       .is_of_pass = true});
  }
}

std::optional<std::size_t> place_of(const TraceRecord& record,
                                    const std::vector<StepShare>& steps) {
  const std::optional<std::size_t> place = last_before(record, steps);
  if (!place || record.begin_ns < steps[*place].end_ns) return place;
  return steps[*place].drained_ns != 0 && is_after_step(record) ? place : std::nullopt;
}

void TraceAnalysis::lay_steps() {
  for (const TraceRecord& record : trace_.records) {
    if (record.kind != TraceKind::kStep) continue;
    steps_.push_back({.step = record.step,
                      .begin_ns = record.begin_ns,
                      .end_ns = record.end_ns,
                      .background_ns = record.size_bytes != 0
                                           ? record.size_bytes  // see TraceKind::kStep
                                           : background_.busy_ns(record.begin_ns, record.end_ns)});
  }
  std::ranges::sort(steps_, {}, &StepShare::begin_ns);
  if (steps_.empty()) return;
  // Skipped steps before it have the same number, and have ended.
  steps_.back().is_open = trace_.open_step != 0 && steps_.back().step == trace_.open_step;
  // The last step has no such time: what is waited for after it, is the end of the run.
  for (const TraceRecord& record : trace_.records) {
    if (!is_after_step(record)) continue;
    const std::optional<std::size_t> place = last_before(record, steps_);
    if (!place || *place + 1 == steps_.size() || record.begin_ns < steps_[*place].end_ns) continue;
    steps_[*place].drained_ns += static_cast<std::int64_t>(record.end_ns - record.begin_ns);
    steps_[*place].background_ns += record.end_ns - record.begin_ns;
  }
}

void TraceAnalysis::share_steps() {
  lay_steps();
  const auto step_of = [this](const TraceRecord& record) -> StepShare* {
    const std::optional<std::size_t> place = place_of(record, steps_);
    return place ? &steps_[*place] : nullptr;
  };
  for (const TraceRecord& record : trace_.records) {
    if (record.kind != TraceKind::kCompute || record.end_ns == record.begin_ns) continue;
    if (StepShare* const step = step_of(record))
      step->compute_ns += static_cast<std::int64_t>(record.end_ns - record.begin_ns);
  }
  for (const Stall& stall : stalls_) {
    if (stall.is_of_pass || stall.record->reason == TraceReason::kNone) continue;
    StepShare* const step = step_of(*stall.record);
    if (step == nullptr) continue;
    const auto duration_ns = static_cast<std::int64_t>(stall.duration_ns());
    step->by_cause[static_cast<std::size_t>(stall.cause)] += duration_ns;
    (blame_of(stall.record->reason) == Blame::kIo ? step->exposed_io_ns
                                                  : step->exposed_optimizer_ns) += duration_ns;
    const TraceReason reason = stall.record->reason;
    if (reason == TraceReason::kCollective || reason == TraceReason::kAnnounce)
      step->rank_wait_ns += duration_ns;
  }
  for (StepShare& step : steps_)
    step.other_ns = step.total_ns() - step.compute_ns - step.exposed_ns();
}

}  // namespace sluice
