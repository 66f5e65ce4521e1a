// The recorder behind I/O tracing: what was moved, computed or waited for, when, and for which unit
// and block. Counters by kind are always on, in bounded memory. Records are kept only while a trace
// runs: each thread writes into a ring of its own. A drainer empties the rings into a file
// (trace_start); tests and benchmarks read them back instead (trace_enable, trace_take).
//
// Thread rule: trace_span(), trace_record(), trace_section() and trace_counts() from any thread;
// the others from one thread at a time, trace_take() while nothing is recorded.
// Invariants: recording never blocks and never throws, and allocates only for a thread's first
// record; a full ring drops the record and counts it. A killed process leaves a file with every
// span that had ended 100 ms earlier, and the steps and waits that had begun by then.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/trace_reason.h>
#include "base/trace/trace_clock.h"

namespace sluice {

// Persisted: never renumber.
enum class TraceKind : std::uint8_t {
  kRead = 0,          // storage to host
  kWrite = 1,         // host to storage
  kCopyToDevice = 2,  // enqueue to completion
  kCopyToHost = 3,
  kAdam = 4,
  kAccumulate = 5,
  kNorm = 6,
  kAcquire = 7,      // the calling thread inside acquire()
  kFinish = 8,       // the calling thread inside finish()
  kStep = 9,         // begin_step() to finish()'s return; size_bytes is none: WorkTimes::any_ns
  kCompute = 10,     // computation under a lease, on its stream
  kWait = 11,        // computation, or the end of the step, waited; `reason` says for what
  kLane = 12,        // a block in a lane of the optimizer pass
  kResident = 13,    // a unit in the device window, from its last copy to its eviction
  kCollective = 14,  // among ranks
  kOnDevice = 15,    // on the device: gradients moved to where they wait, or a unit's update
  kFlush = 16,       // storage makes durable what has been written to it
};
inline constexpr std::size_t kTraceKinds = 17;

std::string_view name_of(TraceKind kind);

inline constexpr std::uint32_t kTraceNone = 0xffffffffu;  // no unit, block or use

// Values of TraceRecord::detail.
inline constexpr std::uint8_t kTraceParameters = 0;  // transfers and copies: the plane
inline constexpr std::uint8_t kTraceOptimizerState = 1;
inline constexpr std::uint8_t kTraceActivations = 2;
inline constexpr std::uint8_t kTraceGradients = 3;
inline constexpr std::uint8_t kTraceGather = 0;  // collectives: the operation
inline constexpr std::uint8_t kTraceReduce = 1;
inline constexpr std::uint8_t kTraceReduceAndGather = 2;  // whole on every rank
inline constexpr std::uint8_t kTraceVote = 3;

// One span. A field that its kind does not use keeps the default below. docs/tracing.md has the
// table of what each kind fills in.
struct TraceRecord {
  std::uint64_t begin_ns = 0;  // steady clock
  std::uint64_t end_ns = 0;
  std::uint64_t started_ns = 0;  // transfers: the drive took it up
  std::uint64_t moved_ns = 0;    // and finished it; checksums follow
  std::uint64_t size_bytes = 0;
  std::uint64_t step = 0;
  std::uint32_t unit = kTraceNone;
  std::uint32_t block = kTraceNone;
  std::uint32_t use = kTraceNone;  // of the step's schedule
  TraceKind kind = TraceKind::kRead;
  TraceReason reason = TraceReason::kNone;
  std::uint8_t lane = 0;    // transfers: the drive
  std::uint8_t detail = 0;  // transfers: the plane; compute: forward 0, backward 1, inference 2
};
static_assert(sizeof(TraceRecord) == 64);

// The name for people: "read h.3 parameters", "h.3 backward", "step 7". `unit`: the unit's name.
std::string span_name(const TraceRecord& record, std::string_view unit);

// --- Counters, always on.

// Durations fall into buckets by powers of two: bucket i counts those in [2^i, 2^(i+1)) ns.
inline constexpr std::size_t kTraceBuckets = 48;

struct TraceCount {
  std::uint64_t spans = 0;
  std::uint64_t size_bytes = 0;
  std::uint64_t busy_ns = 0;
  std::array<std::uint64_t, kTraceBuckets> by_duration{};
};
using TraceCounts = std::array<TraceCount, kTraceKinds>;

// Totals by kind since the process began.
TraceCounts trace_counts();

// --- Records, while a trace runs.

struct TraceOptions {
  std::string file;                      // created with mode 0600, replacing an existing file
  int descriptor = -1;                   // `file`, if it is open already; stays the caller's
  std::uint32_t ring_records = 1 << 20;  // of each thread; rounded up to a power of two
  std::uint32_t rank = 0;
  std::uint32_t ranks = 1;
};

struct TraceResult {
  std::uint64_t records = 0;  // in the file
  std::uint64_t lost = 0;     // dropped by full rings
  std::uint64_t file_bytes = 0;
  std::uint64_t drainer_ns = 0;  // processor time of the thread that wrote it
  std::string failure;           // why the file ends early; empty = it does not
  int error = 0;                 // its errno
};

// Starts a trace into a file.
// Fails with: kInput when the file cannot be created; kInvalidArgument when a trace runs already.
void trace_start(const TraceOptions& options);
// Adds a named text to the file, such as the config; does nothing without a file. A name has at
// most 16 bytes; a text of more than 256 MiB is left out.
void trace_section(std::string_view name, std::string_view text);
// Writes what is left and closes the file. Without a trace it does nothing.
TraceResult trace_stop();

// Starts recording into rings of `ring_records` that nothing drains; 0 stops it. Forgets earlier
// records.
void trace_enable(std::uint32_t ring_records);
// Returns all records since trace_enable() or the last call, ordered by begin_ns; no announcements.
std::vector<TraceRecord> trace_take();

// Not part of the interface: trace_enabled() reads it.
inline std::atomic<bool> trace_is_on{false};

// Relaxed: it is a hint, and no data depends on it.
inline bool trace_enabled() {
  return trace_is_on.load(std::memory_order_relaxed);
}

void trace_append(const TraceRecord& record);

// Records the span while a trace runs.
inline void trace_record(const TraceRecord& record) {
  if (trace_enabled()) trace_append(record);
}

// Counts the span, and records it while a trace runs.
void trace_span(const TraceRecord& record);

// Announces a span that has begun, while a trace runs: `record` without its end. Readers of a
// trace that was never ended take such a span to last to the end of the trace, unless its record
// follows.
inline void trace_begin(TraceRecord record) {
  record.end_ns = 0;
  trace_record(record);
}

// While this object lives and a trace is written into a file, the drainer's thread calls `poll`
// about every 25 ms and writes its records at once. It is for spans whose end no other thread would
// notice. When the destructor returns, `poll` is not running any more. `poll` must not make or
// destroy a TracePoll, nor start or stop a trace.
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

// Calls every TracePoll; the drainer does this.
void run_trace_polls();

}  // namespace sluice
