// The functions read trace files (docs/tracing.md). A file has one rank. The file may be complete,
// cut off anywhere, or damaged.
//
// Thread rule: one thread at a time. The functions are pure, except for reading the file.
// Invariants: a block with a wrong checksum is skipped and counted. The memory for a trace is at
// most a small multiple of the size of the records that are kept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
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

  // The section "clock" gives this clock minus rank 0's steady clock, and the error of this
  // difference. A run of one rank has no such section.
  std::optional<std::int64_t> clock_offset_ns;
  std::uint64_t clock_error_ns = 0;
};

// The steps whose records are kept. If these are not all steps, a file of any size is read within
// the memory for these records.
struct TraceSteps {
  std::uint64_t first = 0;
  std::uint64_t last = UINT64_MAX;

  bool are_all() const { return first == 0 && last == UINT64_MAX; }
};

// Fails with:
// - kInput: the file cannot be read, is no trace, is of another version, or has no record of
//   `steps`.
// - kOutOfMemory: all steps are too much for this machine's memory.
TraceFile read_trace(const std::string& path, TraceSteps steps = {});

// Does the same as read_trace(), but reads from memory. `path` is used only in messages. The
// function calls `passed` with the number of bytes that have been read and are not needed again.
TraceFile parse_trace(
    const std::string& path, std::span<const std::byte> bytes, TraceSteps steps = {},
    const std::function<void(std::size_t)>& passed = [](std::size_t) {});

// Reads the traces of several ranks and brings their times to one clock. The offsets are those that
// the ranks have measured. Without offsets, ranks on the same machine share its clock, and ranks on
// different machines are aligned by their wall clocks.
// Fails with kInput if a file cannot be read, or two files are of the same rank.
std::vector<TraceFile> read_traces(const std::vector<std::string>& paths, TraceSteps steps = {});

}  // namespace sluice
