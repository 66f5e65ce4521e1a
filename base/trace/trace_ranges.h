// These functions show the spans of a trace as NVTX ranges while the spans run. NVIDIA's Nsight
// shows the ranges next to the GPU's work. The ranges have the same names as the spans in a trace.
// Ranges are off by default, and NVTX is not loaded while ranges are off. While ranges are on,
// their cost depends on the tool that receives the ranges. These operations have ranges: steps,
// acquire(), finish(), transfers, copies, updates, norms and collectives. The computation under a
// lease has a range, too. This range lasts while the application enqueues the computation.
//
// Thread rule: any thread may call these functions, and a range may begin on one thread and end on
// another.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/trace/trace_recorder.h"

namespace sluice {

// Switches ranges on for the rest of the process.
// Fails with kUnsupported if this build has no NVTX.
void enable_trace_ranges();

// Sets the names of the units, by unit index. The function must be called before the first range of
// a unit begins. The function does nothing if ranges are off.
void name_trace_units(const std::vector<std::string>& names);

enum class TraceRangeId : std::uint64_t { kNone = 0 };

// This flag is not part of the interface. If the flag is set, begin_trace_range() calls
// start_nvtx_range().
inline std::atomic<bool> trace_ranges_are_on{false};
TraceRangeId start_nvtx_range(const TraceRecord& record);
void end_nvtx_range(TraceRangeId range);

// Begins a range for `record`. The range shows the record's kind. The range also shows the record's
// step, unit and detail if the record's kind uses these fields.
inline TraceRangeId begin_trace_range(const TraceRecord& record) {
  // A relaxed load is enough, because no data depends on the flag.
  return trace_ranges_are_on.load(std::memory_order_relaxed) ? start_nvtx_range(record)
                                                             : TraceRangeId::kNone;
}

// Ends `range` and sets it to kNone. If `range` is kNone, nothing happens.
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

// A span that begins and ends with a C++ scope. The object makes a record and a range. The record
// and the range last from construction to destruction.
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
