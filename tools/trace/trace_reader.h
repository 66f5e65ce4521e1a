// The functions read trace files (docs/tracing.md). A file contains the trace of one rank. The file
// may be complete, cut off at any byte, or damaged.
//
// Thread rule: one thread at a time. The functions are pure, except that they read files.
// Invariants: a block that has a wrong checksum is skipped and counted. The memory for a trace is
// at most a small multiple of the size of the records that are kept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/trace/trace_recorder.h"

namespace sluice {

struct TraceFile {
  std::string path;
  std::uint64_t file_bytes = 0;
  std::vector<TraceRecord> records;             // in the order of the file; open spans last
  std::map<std::string, std::string> sections;  // the last section of each name
  std::uint64_t lost = 0;                       // records that full rings dropped
  std::uint64_t damaged_blocks = 0;
  bool is_complete = false;  // closed by trace_stop()
  // Steps before the first kept one are in the file, and their records were left out (TraceSteps).
  bool lacks_first_steps = false;
  std::uint64_t open_step = 0;  // the step under way at the end of the trace; 0 = none

  // The following values come from the section "sluice-trace".
  std::uint32_t rank = 0;
  std::uint32_t ranks = 1;
  std::string host;
  std::string boot;
  std::uint64_t steady_ns = 0;  // steady_ns and wall_ns are two clocks, read at one instant
  std::uint64_t wall_ns = 0;

  // The offset is this rank's steady clock minus the steady clock of rank 0. The error is the
  // uncertainty of the offset. Both values come from the section "clock". A run of one rank does
  // not write this section.
  std::optional<std::int64_t> clock_offset_ns;
  std::uint64_t clock_error_ns = 0;
};

// The steps whose records are kept. The records of other steps use no memory. A part of a huge file
// can therefore be read even if the whole file would not fit into memory.
struct TraceSteps {
  std::uint64_t first = 0;
  std::uint64_t last = UINT64_MAX;

  bool are_all() const { return first == 0 && last == UINT64_MAX; }
};

// Fails with:
// - kInput: the file cannot be read, is no trace, has another version, or contains no record of
//   `steps`.
// - kOutOfMemory: all steps are wanted, but their records do not fit into this machine's memory.
TraceFile read_trace(const std::string& path, TraceSteps steps = {});

// Does the same as read_trace(), but reads the bytes of a trace from memory. `path` is used in
// messages only. The function calls `passed` with the number of bytes that have been read and are
// no longer needed.
TraceFile parse_trace(
    const std::string& path, std::span<const std::byte> bytes, TraceSteps steps = {},
    const std::function<void(std::size_t)>& passed = [](std::size_t) {});

// Reads the traces of several ranks, and converts their times to one clock. The conversion uses the
// clock offsets that the ranks have measured. If there are no offsets, traces from one machine need
// no conversion, because these traces use the same steady clock. If there are no offsets, traces
// from different machines are aligned by their wall clocks.
// Fails with kInput if a file cannot be read, if two files contain the same rank, or if two files
// are of different runs. Such files have different numbers of ranks, or no time in common.
std::vector<TraceFile> read_traces(const std::vector<std::string>& paths, TraceSteps steps = {});

}  // namespace sluice
