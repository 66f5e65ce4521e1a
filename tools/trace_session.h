// The trace of one run of the command: started before the engine is built, ended after it is gone,
// and then summarised.
//
// Thread rule: one thread at a time; one session in a process at a time.
#pragma once

#include <cstdint>
#include <string>

namespace sluice {

// Whose trace it is.
struct TraceRank {
  std::uint32_t rank = 0;
  std::uint32_t ranks = 1;
};

class TraceSession {
 public:
  // `file` empty: there is no trace. `ring_bytes`: of each thread's ring.
  // Fails with: kInput when the file cannot be created.
  TraceSession(std::string file, std::uint64_t ring_bytes, TraceRank rank = {});
  ~TraceSession();
  TraceSession(const TraceSession&) = delete;
  TraceSession& operator=(const TraceSession&) = delete;

  // Ends the trace and removes its file: there was nothing to record.
  void discard();
  // Ends the trace and returns its summary, and what went wrong with it, as lines for the user.
  std::string finish();

 private:
  std::string file_;
};

}  // namespace sluice
