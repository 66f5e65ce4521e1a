// The trace of one run of the command: started before the engine is built, ended after it is gone,
// and then summarised.
//
// Thread rule: one thread at a time; one session in a process at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <sluice/error.h>
#include "tools/cli/output_file.h"

namespace sluice {

// The run whose trace it is.
struct TraceRank {
  std::uint32_t rank = 0;
  std::uint32_t ranks = 1;
};

struct TraceEnd {
  std::string summary;           // lines for the user
  std::optional<Error> failure;  // why the file is not whole
};

class TraceSession {
 public:
  // `output` not wanted: there is no trace. It must outlive the session; its own name it gets by
  // accept(), or when the trace is finished. `ring_bytes`: of each thread's ring.
  // Fails with: as OutputFile::begin().
  TraceSession(OutputFile& output, std::uint64_t ring_bytes, TraceRank rank = {});
  ~TraceSession();
  TraceSession(const TraceSession&) = delete;
  TraceSession& operator=(const TraceSession&) = delete;

  // Ends the trace. The written part of it has its own name then.
  TraceEnd finish();

 private:
  OutputFile& output_;
};

}  // namespace sluice
