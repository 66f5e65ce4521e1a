// Writes a trace whose steps have the given lengths, for tests of the command: what they show must
// not depend on how long a real run takes.
//
//   made_trace FILE MILLISECONDS...
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "base/trace/trace_recorder.h"

int main(int count, char** words) {
  using namespace sluice;
  if (count < 3) {
    std::fputs("usage: made_trace FILE MILLISECONDS...\n", stderr);
    return 2;
  }
  trace_start({.file = words[1]});
  trace_section("engine", R"({"units": ["only"]})");
  std::uint64_t at_ns = trace_now_ns();
  for (int i = 2; i < count; ++i) {
    const auto step = static_cast<std::uint64_t>(i - 1);
    const std::uint64_t end_ns = at_ns + static_cast<std::uint64_t>(1e6 * std::atof(words[i]));
    trace_record({.begin_ns = at_ns,
                  .end_ns = end_ns,
                  .step = step,
                  .unit = 0,
                  .block = kTraceNone,
                  .kind = TraceKind::kCompute});
    trace_record({.begin_ns = at_ns,
                  .end_ns = end_ns,
                  .step = step,
                  .unit = kTraceNone,
                  .block = kTraceNone,
                  .kind = TraceKind::kStep});
    at_ns = end_ns;
  }
  const TraceResult result = trace_stop();
  return result.failure.empty() && result.lost == 0 ? 0 : 1;
}
