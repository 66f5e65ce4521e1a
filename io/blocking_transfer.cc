#include "io/blocking_transfer.h"

#include <unistd.h>

#include <cerrno>

#include "base/trace/trace_clock.h"
#include "io/transfer_progress.h"

namespace sluice {

std::int64_t attempt_blocking(const IoRequest& request) {
  if (request.kind == IoKind::kFlush)
    return ::fdatasync(request.descriptor) == 0 ? 0 : -static_cast<std::int64_t>(errno);
  const TransferAttempt next = next_attempt(request);
  const auto offset = static_cast<off_t>(next.offset_bytes);
  const ssize_t moved = request.kind == IoKind::kRead
                            ? ::pread(request.descriptor, next.data, next.length_bytes, offset)
                            : ::pwrite(request.descriptor, next.data, next.length_bytes, offset);
  return moved >= 0 ? moved : -static_cast<std::int64_t>(errno);
}

void transfer_blocking(IoRequest& request, RequestLedger& ledger) {
  note_start(request, trace_now_ns());
  TransferStep step;
  do {
    step = advance_transfer(request, attempt_blocking(request));
    ledger.count(request, step);
  } while (step != TransferStep::kEnded);
  request.moved_ns = trace_now_ns();
}

}  // namespace sluice
