// A whole transfer by pread and pwrite, or a flush by fdatasync, on the calling thread, under the
// rules of transfer_progress.h. What sync_queue and thread_queue have in common. Thread rule: any
// thread; the request belongs to the caller.
#pragma once

#include <cstdint>

#include "io/io_queue.h"
#include "io/request_ledger.h"

namespace sluice {

// One system call for the next attempt at `request`. Returns the bytes moved, or -errno.
std::int64_t attempt_blocking(const IoRequest& request);

// Attempts until the request has ended, each counted in `ledger`.
// Requires: begin_transfer(request).
void transfer_blocking(IoRequest& request, RequestLedger& ledger);

}  // namespace sluice
