// Traces of this process behind the C interface.
#include <unistd.h>

#include <atomic>
#include <mutex>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/trace.h>
#include "capi/call_guard.h"
#include "capi/sluice.h"

using namespace sluice;

namespace {

// trace_start() and trace_stop() ask for one thread at a time.
std::mutex trace_mutex;
std::atomic<pid_t> trace_owner = 0;  // the process that has used them; 0: none

// A forked child has neither the thread that writes the file nor a lock that is surely free, since
// another thread may be in one of these functions, or end a trace. So the owner is noted before the
// lock is taken, and stays.
bool is_of_parent() {
  pid_t owner = 0;
  return !trace_owner.compare_exchange_strong(owner, getpid()) && owner != getpid();
}

sluice_status refuse_in_child() {
  return set_error(SLUICE_FORKED,
                   "traces belong to the process that forked this one; start and end them there");
}

}  // namespace

extern "C" {

sluice_status sluice_trace_start(const char* path, uint32_t rank, uint32_t rank_count) {
  const char* const name = __func__;
  if (is_of_parent()) return refuse_in_child();
  return guarded([&] {
    require(path, name, "the path");
    if (rank >= rank_count)
      refuse(fmt::format("{}: rank {} of {} does not exist", name, rank, rank_count));
    const std::scoped_lock lock(trace_mutex);
    trace_start({.file = path, .rank = rank, .ranks = rank_count});
  });
}

sluice_status sluice_trace_stop(sluice_trace_result* result) {
  const char* const name = __func__;
  if (is_of_parent()) return refuse_in_child();
  return guarded([&] {
    const std::scoped_lock lock(trace_mutex);
    const TraceResult ended = trace_stop();
    if (result != nullptr)
      *result = {.records = ended.records, .lost = ended.lost, .file_bytes = ended.file_bytes};
    if (!ended.failure.empty())
      throw Error(ErrorCode::kIo,
                  fmt::format("{}: the trace ends at {} bytes: {}; it can be read up to there",
                              name, ended.file_bytes, ended.failure));
  });
}

}  // extern "C"
