// The clock of trace records. The functions give nanoseconds of the steady clock, computed from the
// processor's time stamp counter. Reading the counter takes a few nanoseconds, while clock_gettime
// takes tens of nanoseconds. If the processor does not call the counter invariant, or if the
// counter drifts, clock_gettime is used instead.
//
// Thread rule: any thread may call every function.
// Invariant: the time stays within some microseconds of steady_now_ns() if calibrate_trace_clock()
// runs about once a second. A calibration may set the time back by some microseconds.
#pragma once

#include <cstdint>
#include <string_view>

namespace sluice {

// The steady clock in nanoseconds, which is the time base of every record and report.
std::uint64_t steady_now_ns();

// The time that the counter gives with its last calibration. Before the first calibration, the
// result is the steady clock's time.
std::uint64_t trace_now_ns();

// Compares the counter with the steady clock. The first call takes two milliseconds.
void calibrate_trace_clock();

// If `forced` is true, trace_now_ns() reads the steady clock, as it does without an invariant
// counter.
void force_steady_trace_clock(bool forced);

// The current source of trace_now_ns(): "tsc" or "clock_gettime".
std::string_view trace_clock_name();

}  // namespace sluice
