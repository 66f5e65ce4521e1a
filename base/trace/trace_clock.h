// The clock of trace records: nanoseconds of the steady clock, read from the processor's time stamp
// counter, which takes a few nanoseconds where clock_gettime takes tens. Where the counter is not
// said to be invariant, or is seen to drift off, it is clock_gettime after all.
//
// Thread rule: every function from any thread.
// Invariant: within some microseconds of steady_now_ns(), as long as somebody calibrates about once
// a second; a calibration may set it back by as much.
#pragma once

#include <cstdint>
#include <string_view>

namespace sluice {

// The steady clock in nanoseconds: the time base of every record and report.
std::uint64_t steady_now_ns();

// The same from the counter, as last calibrated; before the first calibration, the steady clock.
std::uint64_t trace_now_ns();

// Holds the counter against the steady clock. The first call takes two milliseconds.
void calibrate_trace_clock();

// Reads the steady clock from now on, as on a machine without an invariant counter, or no more.
void force_steady_trace_clock(bool forced);

// "tsc" or "clock_gettime": what trace_now_ns() reads now.
std::string_view trace_clock_name();

}  // namespace sluice
