// The trace of one run of the command. The trace starts before the engine is built and ends after
// the engine is destroyed. Then the trace is summarised.
//
// Thread rule: one thread at a time; one session in a process at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <sluice/error.h>
#include "tools/cli/output_file.h"

namespace sluice {

// The rank of the trace, and the number of ranks.
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
  // If `output` is not wanted, there is no trace. `output` must outlive the session. The output
  // gets its final name by accept() or at the end of the trace. `ring_bytes` is the size of each
  // thread's ring.
  // Fails with the errors of OutputFile::begin().
  TraceSession(OutputFile& output, std::uint64_t ring_bytes, TraceRank rank = {});
  ~TraceSession();
  TraceSession(const TraceSession&) = delete;
  TraceSession& operator=(const TraceSession&) = delete;

  // Ends the trace. The part that has been written then has its final name.
  TraceEnd finish();

 private:
  OutputFile& output_;
};

}  // namespace sluice
