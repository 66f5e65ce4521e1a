// Reads trace files (docs/tracing.md). A file has one rank, and may be complete, cut off anywhere,
// or damaged.
//
// Thread rule: pure, except for reading the file; one thread at a time.
// Invariants: a block with a wrong checksum is skipped and counted; the memory for a trace is at
// most a small multiple of the file's size.
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
  std::map<std::string, std::string> sections;  // the last section of each name
  std::uint64_t lost = 0;                       // records that full rings dropped
  std::uint64_t damaged_blocks = 0;
  bool is_complete = false;     // closed by trace_stop()
  std::uint64_t open_step = 0;  // the step under way at the end of the trace; 0 = none

  // From the section "sluice-trace".
  std::uint32_t rank = 0;
  std::uint32_t ranks = 1;
  std::string host;
  std::string boot;
  std::uint64_t steady_ns = 0;  // this and wall_ns are two clocks at the same instant
  std::uint64_t wall_ns = 0;

  // From the section "clock": this clock minus rank 0's steady clock, and the error of this
  // difference. A run of one rank has no such section.
  std::optional<std::int64_t> clock_offset_ns;
  std::uint64_t clock_error_ns = 0;
};

// Fails with: kInput when the file cannot be read or is no trace, or is of another version.
TraceFile read_trace(const std::string& path);

// As read_trace(), but from memory. `path` is used only in messages.
TraceFile parse_trace(const std::string& path, std::span<const std::byte> bytes);

// Reads the traces of several ranks and brings their times to one clock, by the offsets that the
// ranks have measured. Without offsets, ranks on the same machine share its clock, and ranks on
// different machines are aligned by their wall clocks.
// Fails with: kInput when a file cannot be read, or when two files are of the same rank.
std::vector<TraceFile> read_traces(const std::vector<std::string>& paths);

}  // namespace sluice
