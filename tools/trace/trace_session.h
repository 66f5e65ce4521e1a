// The trace of one run of the command. The trace starts before the engine is built and ends after
// the engine is destroyed. After the trace has ended, the session summarises the trace.
//
// Thread rule: one thread at a time. A process has at most one session at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <sluice/error.h>
#include "tools/cli/output_file.h"

namespace sluice {

// The rank that writes the trace, and the number of ranks.
struct TraceRank {
  std::uint32_t rank = 0;
  std::uint32_t ranks = 1;
};

struct TraceEnd {
  std::string summary;           // lines for the user
  std::optional<Error> failure;  // why the file is incomplete
};

class TraceSession {
 public:
  // The constructor starts the trace if output.is_wanted() is true. `output` must outlive the
  // session. OutputFile::accept() gives the file its final name. Without a call of accept(), the
  // file gets its final name at the end of the trace. `ring_bytes` is the size of the ring buffer
  // of each thread.
  // Fails with the errors of OutputFile::begin() and of trace_start().
  TraceSession(OutputFile& output, std::uint64_t ring_bytes, TraceRank rank = {});
  ~TraceSession();
  TraceSession(const TraceSession&) = delete;
  TraceSession& operator=(const TraceSession&) = delete;

  // Ends the trace. After the call, the file has its final name, even if the trace is incomplete.
  // If `is_quiet` is false, a terminal shows the progress.
  TraceEnd finish(bool is_quiet);

 private:
  OutputFile& output_;
};

}  // namespace sluice
