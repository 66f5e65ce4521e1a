// The clock of trace records. The clock gives the time of the steady clock in nanoseconds. This
// time is computed from the processor's time stamp counter. A read of the counter takes a few
// nanoseconds, and a call of clock_gettime takes tens of nanoseconds. The clock uses clock_gettime
// if the processor does not promise a constant counter rate, or if the counter drifts.
//
// Thread rule: any thread may call every function.
// Invariant: the time stays within some microseconds of steady_now_ns() if calibrate_trace_clock()
// runs about once a second. A calibration may set the time back by some microseconds.
#pragma once

#include <cstdint>
#include <string_view>

namespace sluice {

// The time of the steady clock in nanoseconds. All records and reports use this time base.
std::uint64_t steady_now_ns();

// Computes the time from the counter and from the counter's last calibration. Before the first
// calibration, the result is the steady clock's time.
std::uint64_t trace_now_ns();

// Calibrates the counter against the steady clock. The first call takes two milliseconds.
void calibrate_trace_clock();

// Until the next calibration, trace_now_ns() reads the steady clock. Call this function when the
// counter is no longer calibrated.
void rest_trace_clock();

// If `forced` is true, trace_now_ns() reads the steady clock. On a processor without an invariant
// counter, trace_now_ns() always reads the steady clock.
void force_steady_trace_clock(bool forced);

// Returns the name of the current source of trace_now_ns(): "tsc" or "clock_gettime".
std::string_view trace_clock_name();

}  // namespace sluice
