// The spans of a trace as NVTX ranges, while they happen: NVIDIA's Nsight shows them, by the names
// that a trace gives them, beside what the GPU does. Off unless switched on, and then nothing of
// NVTX is loaded; on, a range costs what the tool that listens takes. There are ranges for steps,
// acquire(), finish(), computation under a lease as the application enqueues it, transfers, copies,
// updates, norms and collectives.
//
// Thread rule: any thread; a range may end on another one than it began on.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/trace/trace.h"

namespace sluice {

// Switches them on for the rest of the process.
// Fails with: kUnsupported when this build has no NVTX.
void enable_trace_ranges();

// By index. Call it before the units' first ranges; nothing unless they are on.
void name_trace_units(const std::vector<std::string>& names);

enum class TraceRangeId : std::uint64_t { kNone = 0 };

// Not part of the interface: what begin_trace_range() reads, and what it calls.
inline std::atomic<bool> trace_ranges_are_on{false};
TraceRangeId start_nvtx_range(const TraceRecord& record);
void end_nvtx_range(TraceRangeId range);

// `record`: its kind, and what its kind has of step, unit and detail.
inline TraceRangeId begin_trace_range(const TraceRecord& record) {
  // Relaxed: a switch, no data hangs on it.
  return trace_ranges_are_on.load(std::memory_order_relaxed) ? start_nvtx_range(record)
                                                             : TraceRangeId::kNone;
}

// Nothing for kNone, which `range` is afterwards.
inline void end_trace_range(TraceRangeId& range) {
  if (range != TraceRangeId::kNone) end_nvtx_range(std::exchange(range, TraceRangeId::kNone));
}

// One that ends with its scope.
class TraceRange {
 public:
  explicit TraceRange(const TraceRecord& record) : id_(begin_trace_range(record)) {}
  ~TraceRange() { end_trace_range(id_); }
  TraceRange(const TraceRange&) = delete;
  TraceRange& operator=(const TraceRange&) = delete;

 private:
  TraceRangeId id_;
};

// A span that is a scope: a record of it, from here to there, and a range.
class TraceScope {
 public:
  explicit TraceScope(const TraceRecord& record) : record_(record), range_(record) {
    record_.begin_ns = trace_now_ns();
  }
  ~TraceScope() {
    record_.end_ns = trace_now_ns();
    trace_span(record_);
  }
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  TraceRecord record_;
  TraceRange range_;
};

}  // namespace sluice
