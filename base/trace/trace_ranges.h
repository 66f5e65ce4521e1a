// The spans of a trace as NVTX ranges, while they happen: NVIDIA's Nsight shows them, under the
// names that a trace gives them, beside what the GPU does. They are off unless switched on, and
// while off nothing of NVTX is loaded; while on, a range costs what the listening tool takes. There
// are ranges for steps, acquire(), finish(), computation under a lease as the application enqueues
// it, transfers, copies, updates, norms and collectives.
//
// Thread rule: any thread; a range may end on another thread than it began on.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/trace/trace.h"

namespace sluice {

// Switches ranges on for the rest of the process.
// Fails with: kUnsupported when this build has no NVTX.
void enable_trace_ranges();

// Names units by index. Call it before the units' first ranges; does nothing unless ranges are on.
void name_trace_units(const std::vector<std::string>& names);

enum class TraceRangeId : std::uint64_t { kNone = 0 };

// Not part of the interface: begin_trace_range() reads the first and calls the second.
inline std::atomic<bool> trace_ranges_are_on{false};
TraceRangeId start_nvtx_range(const TraceRecord& record);
void end_nvtx_range(TraceRangeId range);

// `record`: its kind, and those of step, unit and detail that the kind uses.
inline TraceRangeId begin_trace_range(const TraceRecord& record) {
  // Relaxed: it is a switch, and no data depends on it.
  return trace_ranges_are_on.load(std::memory_order_relaxed) ? start_nvtx_range(record)
                                                             : TraceRangeId::kNone;
}

// Ends `range` and sets it to kNone; does nothing for kNone.
inline void end_trace_range(TraceRangeId& range) {
  if (range != TraceRangeId::kNone) end_nvtx_range(std::exchange(range, TraceRangeId::kNone));
}

// A range that ends with its scope.
class TraceRange {
 public:
  explicit TraceRange(const TraceRecord& record) : id_(begin_trace_range(record)) {}
  ~TraceRange() { end_trace_range(id_); }
  TraceRange(const TraceRange&) = delete;
  TraceRange& operator=(const TraceRange&) = delete;

 private:
  TraceRangeId id_;
};

// A span that is a scope: a record from construction to destruction, and a range.
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
