// Explains the records of a trace. The analysis divides the time of each step into parts, and
// divides the waiting time by cause. The analysis also finds the cause of every wait. The analysis
// also finds the times at which each drive, each link and the processor was in use.
//
// Thread rule: any thread. The functions are pure. The trace must outlive the analysis.
// Invariants: the parts of a step's time add up to the step's time. Every wait has one cause.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "tools/trace/interval_set.h"
#include "tools/trace/trace_reader.h"

namespace sluice {

// The reason for a wait. docs/tracing.md describes how a cause is found.
enum class StallCause : std::uint8_t {
  kEngine,  // no other cause is found; includes hand-overs between threads
  kLatePrefetch,
  kBandwidth,
  kLatencyTail,
  kNoBuffer,
  kCopyLink,
  kAdam,
  kCollective,
  kChecksum,
  kSchedule,
  kCommit,
  kSave,
  kAnnounce,
};
inline constexpr std::size_t kStallCauses = 13;

std::string_view name_of(StallCause cause);

// A wait and its cause.
struct Stall {
  const TraceRecord* record = nullptr;  // the wait (kWait), or the Adam update that came late
  std::uint64_t begin_ns = 0;
  std::uint64_t end_ns = 0;
  StallCause cause = StallCause::kEngine;
  bool is_of_pass = false;  // true: the optimizer pass waited; false: computation waited

  std::uint64_t duration_ns() const { return end_ns - begin_ns; }
};

// The parts of a step's time.
struct StepShare {
  std::uint64_t step = 0;
  std::uint64_t begin_ns = 0;
  std::uint64_t end_ns = 0;
  // The time after `end_ns` for which the application waited for the rest of the step's update,
  // before the next step began. An example is a validation. The time is part of the step's time.
  std::int64_t drained_ns = 0;
  std::int64_t compute_ns = 0;
  std::int64_t exposed_io_ns = 0;
  std::int64_t exposed_optimizer_ns = 0;
  std::int64_t other_ns = 0;
  // The time during which storage, the copies to the device, or the optimizer was busy. The engine
  // measures `background_ns`. If the engine's measurement is missing from a trace, `background_ns`
  // is computed from the records.
  std::uint64_t background_ns = 0;
  std::int64_t rank_wait_ns = 0;  // the part of exposed I/O that waits for other ranks
  bool is_open = false;           // the run was killed in this step
  std::array<std::int64_t, kStallCauses> by_cause{};

  std::int64_t total_ns() const {
    return static_cast<std::int64_t>(end_ns - begin_ns) + drained_ns;
  }
  std::int64_t exposed_ns() const { return exposed_io_ns + exposed_optimizer_ns; }
  // Returns `background_ns` minus the waits for storage, copies and the optimizer. Returns 0 if
  // these waits are longer than `background_ns`.
  std::int64_t hidden_ns() const;
};

// Returns the place in `steps` of the step to whose time `record` belongs. The record began in this
// step, or is a wait after it that is part of StepShare::drained_ns. The steps must be in order of
// time.
std::optional<std::size_t> place_of(const TraceRecord& record, const std::vector<StepShare>& steps);

// Percentiles of durations. Each percentile is one of the durations, found by the nearest-rank
// method.
struct Percentiles {
  std::uint64_t p50_ns = 0;
  std::uint64_t p99_ns = 0;
  std::uint64_t p999_ns = 0;
};
Percentiles percentiles_of(std::vector<std::uint64_t> durations_ns);

// Identifies a flow of bytes. A flow is one direction of one drive, all copies in one direction, or
// all collectives of one kind.
struct FlowKey {
  TraceKind kind = TraceKind::kRead;
  std::uint32_t drive = 0;  // for collectives, their TraceRecord::detail

  auto operator<=>(const FlowKey&) const = default;
};

struct FlowStats {
  TraceKind kind = TraceKind::kRead;
  std::uint32_t drive = 0;
  std::uint64_t spans = 0;
  std::uint64_t size_bytes = 0;
  std::uint64_t busy_ns = 0;  // time with at least one transfer under way at the drive
  Percentiles queue;          // from the request to the start at the drive
  Percentiles device;         // from the start to the last byte
  Percentiles whole;          // the whole time, with checksum and hand-over

  FlowKey key() const { return {kind, drive}; }
  double bytes_per_second() const;
};

// Returns a name for people, such as "read drive 0", "copy to device" or "gather".
std::string name_of(const FlowKey& flow);

// Returns the flow of `record`. Returns nothing if the record does not describe a transfer.
std::optional<FlowKey> flow_of(const TraceRecord& record);
// started_ns() returns the time at which the drive or link started the transfer of `record`.
// moved_ns() returns the time at which the last byte arrived.
std::uint64_t started_ns(const TraceRecord& record);
std::uint64_t moved_ns(const TraceRecord& record);

class TraceAnalysis {
 public:
  explicit TraceAnalysis(const TraceFile& trace);

  const TraceFile& trace() const { return trace_; }
  const std::vector<StepShare>& steps() const { return steps_; }
  // The waits are in order of time.
  const std::vector<Stall>& stalls() const { return stalls_; }
  const std::vector<FlowStats>& flows() const { return flows_; }
  // Returns the time intervals of all transfers of one drive, in both directions.
  const IntervalSet& drive(std::size_t index) const { return drives_[index]; }
  std::size_t drive_count() const { return drives_.size(); }
  const IntervalSet& processor() const { return processor_; }
  const IntervalSet& link_up() const { return link_up_; }

 private:
  using Index = std::unordered_map<std::uint64_t, std::vector<const TraceRecord*>>;

  // Returns the key that finds the reads of a block in `reads_`. A key for activations contains the
  // unit's number and no block's number, because activations have no blocks.
  static std::uint64_t read_key(std::uint32_t block_or_unit, std::uint8_t plane) {
    return std::uint64_t{block_or_unit} << 8 | plane;
  }
  static std::uint64_t read_key(const TraceRecord& read) {
    return read_key(read.detail == kTraceActivations ? read.unit : read.block, read.detail);
  }
  void lay_out();
  void collect_flows();
  void judge_waits();
  void judge_pass();
  void lay_steps();
  void share_steps();
  StallCause cause_of_wait(const TraceRecord& wait) const;
  StallCause cause_of_read(std::uint32_t block, std::uint8_t plane, std::uint64_t begin_ns,
                           std::uint64_t end_ns) const;
  StallCause cause_of_update_read(std::uint32_t block, std::uint64_t begin_ns,
                                  std::uint64_t end_ns) const;
  StallCause cause_by_use(std::uint64_t begin_ns, std::uint64_t end_ns) const;
  StallCause cause_of_slot(std::uint64_t begin_ns, std::uint64_t end_ns) const;
  StallCause cause_of_activation(std::uint32_t unit, std::uint64_t begin_ns,
                                 std::uint64_t end_ns) const;
  StallCause cause_of_copy(std::uint32_t unit, std::uint64_t begin_ns, std::uint64_t end_ns) const;
  const TraceRecord* find(const Index& index, std::uint64_t key, std::uint64_t begin_ns,
                          std::uint64_t end_ns) const;

  const TraceFile& trace_;
  std::vector<IntervalSet> drives_;  // each interval begins when the drive starts the transfer
  // The transfers of all drives. Each interval begins at the time of the request.
  IntervalSet requests_{IntervalSet::For::kDepth};
  IntervalSet processor_;
  IntervalSet link_up_;
  IntervalSet link_down_;
  IntervalSet background_;
  bool streams_updates_ = false;                   // true: updates copy blocks to the device
  Index reads_;                                    // by block and plane
  Index copies_;                                   // copies to the device, by unit
  Index lanes_;                                    // by block
  std::array<std::uint64_t, 4> median_read_ns_{};  // time at the drive, by plane
  std::vector<StepShare> steps_;
  std::vector<Stall> stalls_;
  std::vector<FlowStats> flows_;
};

}  // namespace sluice
