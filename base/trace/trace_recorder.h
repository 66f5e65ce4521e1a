// The recorder for traces of a run. A record says what was moved, computed or awaited. The record
// also names the time, the unit and the block. Counters for each kind of record are always on and
// take bounded memory. Records are kept only while a trace runs. Each thread writes its records
// into its own ring. If the trace goes to a file, a thread called the drainer empties the rings
// into that file (trace_start() of sluice/trace.h). Tests and benchmarks take the records from the
// rings instead (trace_enable, trace_take).
//
// Thread rule: any thread may call trace_span(), trace_record(), trace_section() and
// trace_counts(). Only one thread at a time may call the other functions. The function trace_take()
// may be called only while nothing is recorded. Invariants: recording never blocks or throws, and
// allocates memory only for the first record of a thread. If a ring is full, the record is dropped
// and counted as lost. If the process is killed, the file has every span that ended at least 100 ms
// before the kill. The file also has every step and wait that began at least 100 ms before the
// kill.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/trace.h>
#include <sluice/trace_reason.h>
#include "base/trace/trace_clock.h"

namespace sluice {

// A trace file holds these numbers, so the numbers must never change.
enum class TraceKind : std::uint8_t {
  kRead = 0,          // storage to host
  kWrite = 1,         // host to storage
  kCopyToDevice = 2,  // from enqueue to completion
  kCopyToHost = 3,
  kAdam = 4,
  kAccumulate = 5,
  kNorm = 6,
  kAcquire = 7,      // the calling thread inside acquire()
  kFinish = 8,       // the calling thread inside finish()
  kStep = 9,         // from begin_step() to the end of finish(); size_bytes is WorkTimes::any_ns
  kCompute = 10,     // computation under a lease, on the lease's stream
  kWait = 11,        // the computation or the step's end waited; `reason` says why
  kLane = 12,        // a block in a lane of the optimizer pass
  kResident = 13,    // a unit in the device window, from its last copy to its eviction
  kCollective = 14,  // an operation among ranks
  kOnDevice = 15,    // the device moved gradients that wait, or updated a unit
  kFlush = 16,       // storage makes earlier writes durable
};
inline constexpr std::size_t kTraceKinds = 17;

std::string_view name_of(TraceKind kind);

inline constexpr std::uint32_t kTraceNone = 0xffffffffu;  // no unit, block or use

// These are the values of TraceRecord::detail. Each value names the moved data, or the operation of
// a collective.
inline constexpr std::uint8_t kTraceParameters = 0;  // the plane of transfers and copies
inline constexpr std::uint8_t kTraceOptimizerState = 1;
inline constexpr std::uint8_t kTraceActivations = 2;
inline constexpr std::uint8_t kTraceGradients = 3;
inline constexpr std::uint8_t kTraceGather = 0;  // the operation of collectives
inline constexpr std::uint8_t kTraceReduce = 1;
inline constexpr std::uint8_t kTraceReduceAndGather = 2;  // the result is whole on every rank
inline constexpr std::uint8_t kTraceVote = 3;

// One span. If the span's kind does not use a field, the field keeps its default value. A table in
// docs/tracing.md lists the fields that each kind uses.
struct TraceRecord {
  std::uint64_t begin_ns = 0;  // steady clock
  std::uint64_t end_ns = 0;
  std::uint64_t started_ns = 0;  // transfers: when the drive began
  std::uint64_t moved_ns = 0;    // transfers: when the drive ended, before checksums
  std::uint64_t size_bytes = 0;
  std::uint64_t step = 0;
  std::uint32_t unit = kTraceNone;
  std::uint32_t block = kTraceNone;
  std::uint32_t use = kTraceNone;  // the number of the use in the step's schedule
  TraceKind kind = TraceKind::kRead;
  TraceReason reason = TraceReason::kNone;
  std::uint8_t lane = 0;    // transfers: the drive
  std::uint8_t detail = 0;  // transfers: the plane; compute: forward 0, backward 1, inference 2
};
static_assert(sizeof(TraceRecord) == 64);

// A readable name of a span: "read h.3 parameters", "h.3 backward", "step 7". `unit` is the name of
// the span's unit.
std::string span_name(const TraceRecord& record, std::string_view unit);

// --- Counters, always on.

// Durations are counted in buckets. The bounds of the buckets are powers of two. Bucket i counts
// durations in [2^i, 2^(i+1)) ns.
inline constexpr std::size_t kTraceBuckets = 48;

struct TraceCount {
  std::uint64_t spans = 0;
  std::uint64_t size_bytes = 0;
  std::uint64_t busy_ns = 0;
  std::array<std::uint64_t, kTraceBuckets> by_duration{};
};
using TraceCounts = std::array<TraceCount, kTraceKinds>;

// The totals of each kind of record since the process began.
TraceCounts trace_counts();

// --- Records, which are kept only while a trace runs.

// Adds `text` to the file under the name `name`. For example, the text may be the config. Does
// nothing if the trace has no file. A name has at most 16 bytes. A text of more than 256 MiB is
// left out.
void trace_section(std::string_view name, std::string_view text);
// Begins to record into rings of `ring_records` records each, without a drainer. If `ring_records`
// is 0, recording ends. Earlier records are dropped.
void trace_enable(std::uint32_t ring_records);
// Returns all records since the last call of trace_enable() or trace_take(), ordered by begin_ns.
// Announcements (trace_begin) are left out.
std::vector<TraceRecord> trace_take();

// This flag is not part of the interface. The function trace_enabled() reads the flag.
inline std::atomic<bool> trace_is_on{false};

// Returns whether a trace is running.
inline bool trace_enabled() {
  return trace_is_on.load(std::memory_order_relaxed);
}

// Appends the record to the running trace. The counters do not change.
void trace_append(const TraceRecord& record);

// The function records the span if a trace is running. The counters do not change.
inline void trace_record(const TraceRecord& record) {
  if (trace_enabled()) trace_append(record);
}

// Counts the span. If a trace is running, the call also records the span.
void trace_span(const TraceRecord& record);

// Announces that a span has begun. If a trace is running, the call records `record` without an end.
// An unfinished trace may lack the full record of an announced span. A reader assumes that a
// span without its full record lasts to the end of the trace.
inline void trace_begin(TraceRecord record) {
  record.end_ns = 0;
  trace_record(record);
}

// While this object lives and a trace goes to a file, the drainer's thread calls `poll` about every
// 25 ms. After the calls of all `poll` functions, the drainer writes the new records immediately.
// `poll` records the spans whose end no other thread observes. Once the destructor has returned,
// `poll` is not running and is never called again. `poll` must not make or destroy a TracePoll, and
// must not start or stop a trace.
class TracePoll {
 public:
  explicit TracePoll(std::function<void()> poll);
  ~TracePoll();
  TracePoll(const TracePoll&) = delete;
  TracePoll& operator=(const TracePoll&) = delete;

 private:
  friend void run_trace_polls();
  std::function<void()> poll_;
};

// Calls the `poll` function of every TracePoll. Only the drainer calls this function.
void run_trace_polls();

}  // namespace sluice
