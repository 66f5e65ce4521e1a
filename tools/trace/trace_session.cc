#include "tools/trace/trace_session.h"

#include <algorithm>

#include <fmt/format.h>

#include <sluice/units.h>
#include "base/trace/trace_recorder.h"
#include "tools/cli/print.h"
#include "tools/cli/terminal.h"
#include "tools/trace/trace_summary.h"

namespace sluice {
TraceSession::TraceSession(OutputFile& output, std::uint64_t ring_bytes, TraceRank rank)
    : output_(output) {
  if (!output_.is_wanted()) return;
  output_.begin();
  // trace_start() refuses far smaller numbers.
  const std::uint64_t records =
      std::min<std::uint64_t>(ring_bytes / sizeof(TraceRecord), UINT32_MAX);
  trace_start({.file = output_.path(),
               .descriptor = output_.descriptor(),
               .ring_records = static_cast<std::uint32_t>(records),
               .rank = rank.rank,
               .ranks = rank.ranks});
}

TraceSession::~TraceSession() {
  (void)trace_stop();
  if (const auto lost = output_.loss()) warn("sluice: {}\n", lost->what());
}

TraceEnd TraceSession::finish(bool is_quiet) {
  if (!output_.is_wanted()) return {};
  const Progress progress("summing up the trace", is_quiet);
  const TraceResult result = trace_stop();
  TraceEnd end;
  end.summary = fmt::format("trace: {} records in {} ({})\n", result.records, output_.path(),
                            format_bytes(result.file_bytes));
  try {
    output_.commit();  // one that is cut may still be read, up to there
  } catch (const Error& error) {
    end.failure = error;
  }
  if (output_.loss()) {  // the file of that name is another one
    output_.discard();
    return {.summary = {}, .failure = end.failure};
  }
  if (!result.failure.empty())
    end.failure = output_.failure(fmt::format("it ends at {}", format_bytes(result.file_bytes)),
                                  result.error);
  if (!output_.is_regular()) return end;  // it cannot be read back
  try {
    const TraceFile trace = read_trace(output_.path());
    std::vector<TraceAnalysis> ranks;
    ranks.emplace_back(trace);
    end.summary += summary_of(ranks, {});
  } catch (const Error& error) {
    end.summary += fmt::format("no summary: {}\n", error.what());
  }
  return end;
}

}  // namespace sluice
