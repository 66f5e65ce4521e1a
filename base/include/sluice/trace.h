// Traces of a run. A trace is a file that lists every transfer, update and wait. The command
// `sluice trace` reads the file. A trace records all engines and optimizers of the process.
//
// Thread rule: only one thread at a time may call these functions.
#pragma once

#include <cstdint>
#include <string>

#include <sluice/export.h>

namespace sluice {

struct TraceOptions {
  std::string file;                      // created with mode 0600, replacing an existing file
  int descriptor = -1;                   // the open `file`, or -1; the caller closes the descriptor
  std::uint32_t ring_records = 1 << 20;  // per thread, at most 2^30; rounded up to a power of two
  std::uint32_t rank = 0;
  std::uint32_t ranks = 1;
};

struct TraceResult {
  std::uint64_t records = 0;  // in the file
  std::uint64_t lost = 0;     // dropped: a ring was full, or a thread found no memory for its ring
  std::uint64_t file_bytes = 0;
  std::uint64_t drainer_ns = 0;  // processor time of the drainer
  std::string failure;           // why the file ends early; empty if complete
  int error = 0;                 // the errno of the failure
};

// Starts a trace that goes to a file. Must be called before the engine is made.
// Fails with kInput if the file cannot be created, and with kUnsupported if the process has no
// descriptor left. Fails with kInvalidArgument if a trace is already running, and with kOutOfMemory
// if the system refuses the memory for one ring.
SLUICE_EXPORT void trace_start(const TraceOptions& options);
// Writes the remaining records and closes the file. Does nothing if no trace is running. Must be
// called after the engine is gone.
SLUICE_EXPORT TraceResult trace_stop();

}  // namespace sluice
