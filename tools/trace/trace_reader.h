// Reads trace files (docs/tracing.md): one rank each, whole, cut off anywhere, or damaged.
//
// Thread rule: pure, except for reading the file; one thread at a time.
// Invariants: a block whose checksum does not fit is skipped and counted; what is read never takes
// more memory than a small multiple of the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/trace/trace.h"

namespace sluice {

struct TraceFile {
  std::string path;
  std::uint64_t file_bytes = 0;
  std::vector<TraceRecord> records;             // in the order of the file; open spans last
  std::map<std::string, std::string> sections;  // the last of each name
  std::uint64_t lost = 0;                       // records that full rings dropped
  std::uint64_t damaged_blocks = 0;
  bool is_complete = false;     // closed by trace_stop()
  std::uint64_t open_step = 0;  // the step that the trace ended in; 0 = none

  // From the section "sluice-trace".
  std::uint32_t rank = 0;
  std::uint32_t ranks = 1;
  std::string host;
  std::string boot;
  std::uint64_t steady_ns = 0;  // two clocks at one instant
  std::uint64_t wall_ns = 0;

  // From the section "clock": ahead of rank 0's steady clock by this, give or take the error.
  // Traces of one rank have none.
  std::optional<std::int64_t> clock_offset_ns;
  std::uint64_t clock_error_ns = 0;
};

// Fails with: kInput when the file cannot be read or is no trace, or is of another version.
TraceFile read_trace(const std::string& path);

// The same from memory; `path` is for messages.
TraceFile parse_trace(const std::string& path, std::span<const std::byte> bytes);

// Several ranks' traces on one clock, by the offsets that the ranks have measured among themselves;
// where there are none, ranks on one machine share its clock, and those of others are set by their
// wall clocks.
// Fails with: kInput when a file cannot be read, or two are of one rank.
std::vector<TraceFile> read_traces(const std::vector<std::string>& paths);

}  // namespace sluice
