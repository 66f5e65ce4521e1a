// The cost of recording: nanoseconds per record with each clock and without a trace, and whether
// anything is lost at a million records a second from each of some threads. A benchmark: it asserts
// nothing.
//
//   trace_cost FILE [THREADS [SECONDS]]
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "base/trace/trace_recorder.h"

namespace sluice {
namespace {

constexpr int kBatch = 256;  // timed together, and then a pause that lets the drainer keep up
constexpr int kBatches = 4000;

// The median over batches of nanoseconds for one call of `record`.
double median_ns(const auto& record) {
  std::vector<double> times;
  for (int batch = 0; batch < kBatches; ++batch) {
    const std::uint64_t begin_ns = steady_now_ns();
    for (int i = 0; i < kBatch; ++i) record();
    times.push_back(static_cast<double>(steady_now_ns() - begin_ns) / kBatch);
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  std::ranges::nth_element(times, times.begin() + kBatches / 2);
  return times[kBatches / 2];
}

// As the engine does it: the clock is read at the end of the span.
void record_span() {
  trace_record(
      {.begin_ns = 1, .end_ns = trace_now_ns(), .size_bytes = 4096, .kind = TraceKind::kRead});
}

void measure_cost(const std::string& file) {
  const double off = median_ns([] { trace_record({.begin_ns = 1, .end_ns = 2}); });
  fmt::print("{:<34}{:>8.2f} ns a call\n", "no trace", off);
  for (const bool forced : {false, true}) {
    force_steady_trace_clock(forced);
    trace_start({.file = file});
    const std::string clock(trace_clock_name());
    const double cost = median_ns(record_span);
    const TraceResult result = trace_stop();
    fmt::print("{:<34}{:>8.2f} ns a record, {} lost of {}\n", clock, cost, result.lost,
               result.lost + result.records);
  }
  force_steady_trace_clock(false);
  const double counted = median_ns([] { trace_span({.begin_ns = 1, .end_ns = 2}); });
  fmt::print("{:<34}{:>8.2f} ns a call\n", "counters, no trace", counted);
}

// A million records a second, in bursts of a tenth of a millisecond.
void record_steadily(double seconds) {
  const auto begin = std::chrono::steady_clock::now();
  const auto bursts = static_cast<std::int64_t>(seconds * 1e4);
  for (std::int64_t burst = 0; burst < bursts; ++burst) {
    for (int i = 0; i < 100; ++i) record_span();
    std::this_thread::sleep_until(begin + std::chrono::microseconds(100 * (burst + 1)));
  }
}

void measure_loss(const std::string& file, int threads, double seconds) {
  trace_start({.file = file});
  std::vector<std::thread> writers;
  for (int i = 0; i < threads; ++i) writers.emplace_back(record_steadily, seconds);
  for (std::thread& writer : writers) writer.join();
  const TraceResult result = trace_stop();
  fmt::print("{} threads, 1e6 records/s each for {:g} s: {} written, {} lost{}{}\n", threads,
             seconds, result.records, result.lost, result.failure.empty() ? "" : "; ",
             result.failure);
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  const std::string file = argv[1];
  sluice::measure_cost(file);
  sluice::measure_loss(file, argc > 2 ? std::atoi(argv[2]) : 1, argc > 3 ? std::atof(argv[3]) : 10);
  return 0;
}
