// The recorder behind I/O tracing: what was moved or computed, when, and for which unit and block.
// Off unless enabled; then each thread writes to a ring of its own, and the oldest records give way
// to new ones. The engine's call sites are in place; tests read the records to prove overlap and
// order.
//
// Thread rule: trace_record() from any thread. trace_enable() and trace_take() while no other
// thread records.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace sluice {

// Persisted by tools one day: never renumber.
enum class TraceKind : std::uint8_t {
  kRead = 0,          // storage to host
  kWrite = 1,         // host to storage
  kCopyToDevice = 2,  // enqueue to completion
  kCopyToHost = 3,
  kAdam = 4,
  kAccumulate = 5,
  kNorm = 6,
  kAcquire = 7,  // the calling thread inside acquire()
  kFinish = 8,   // the calling thread inside finish()
};

std::string_view name_of(TraceKind kind);

inline constexpr std::uint32_t kTraceNone = 0xffffffffu;  // no unit, or no block

struct TraceRecord {
  std::uint64_t begin_ns = 0;  // steady clock
  std::uint64_t end_ns = 0;
  std::uint64_t size_bytes = 0;
  std::uint64_t step = 0;
  std::uint32_t unit = kTraceNone;
  std::uint32_t block = kTraceNone;
  TraceKind kind = TraceKind::kRead;
  std::uint8_t reserved[23] = {};
};
static_assert(sizeof(TraceRecord) == 64);

// The steady clock in nanoseconds: the time base of every record and report.
std::uint64_t steady_now_ns();

// Starts recording with room for `records_per_thread` in each thread's ring; 0 stops it. Forgets
// what was recorded before.
void trace_enable(std::uint32_t records_per_thread);
bool trace_enabled();
void trace_record(const TraceRecord& record);

// All records since trace_enable(), ordered by begin_ns.
std::vector<TraceRecord> trace_take();

}  // namespace sluice
