#include "tools/trace_session.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "base/error.h"
#include "base/trace.h"
#include "base/units.h"
#include "tools/trace_summary.h"

namespace sluice {
namespace {

constexpr std::uint64_t kRingMax = 1 << 26;  // records; 4 GiB

}  // namespace

TraceSession::TraceSession(std::string file, std::uint64_t ring_bytes, TraceRank rank)
    : file_(std::move(file)) {
  if (file_.empty()) return;
  const std::uint64_t records = std::min<std::uint64_t>(ring_bytes / sizeof(TraceRecord), kRingMax);
  trace_start({.file = file_,
               .ring_records = static_cast<std::uint32_t>(records),
               .rank = rank.rank,
               .ranks = rank.ranks});
}

TraceSession::~TraceSession() {
  (void)trace_stop();
}

void TraceSession::discard() {
  (void)trace_stop();
  if (!file_.empty()) (void)::unlink(file_.c_str());
}

std::string TraceSession::finish() {
  if (file_.empty()) return {};
  const TraceResult result = trace_stop();
  std::string text = fmt::format("trace: {} records in {} ({})\n", result.records, file_,
                                 format_bytes(result.file_bytes));
  if (!result.failure.empty()) text += result.failure + "\n";
  try {
    const TraceFile trace = read_trace(file_);
    std::vector<TraceAnalysis> ranks;
    ranks.emplace_back(trace);
    text += summary_of(ranks, {});
  } catch (const Error& error) {
    // A trace into a pipe or a device cannot be read back.
    text += fmt::format("no summary: {}\n", error.what());
  }
  return text;
}

}  // namespace sluice
