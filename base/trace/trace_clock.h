// The clock of trace records: nanoseconds of the steady clock, read from the processor's time stamp
// counter. That takes a few nanoseconds where clock_gettime takes tens. Where the counter is not
// said to be invariant, or is seen to drift, clock_gettime is used after all.
//
// Thread rule: every function from any thread.
// Invariant: the time stays within some microseconds of steady_now_ns(), provided that
// calibrate_trace_clock() runs about once a second; a calibration may set it back by as much.
#pragma once

#include <cstdint>
#include <string_view>

namespace sluice {

// The steady clock in nanoseconds: the time base of every record and report.
std::uint64_t steady_now_ns();

// The same, from the counter as last calibrated; before the first calibration, the steady clock.
std::uint64_t trace_now_ns();

// Compares the counter with the steady clock. The first call takes two milliseconds.
void calibrate_trace_clock();

// While `forced`, trace_now_ns() reads the steady clock, as without an invariant counter.
void force_steady_trace_clock(bool forced);

// The source of trace_now_ns() now: "tsc" or "clock_gettime".
std::string_view trace_clock_name();

}  // namespace sluice
