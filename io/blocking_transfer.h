// A whole transfer by pread and pwrite, or a flush by fdatasync, on the calling thread, under the
// rules of transfer_progress.h. sync_queue and thread_queue share it. Thread rule: any thread; the
// request belongs to the caller.
#pragma once

#include <cstdint>

#include "io/io_queue.h"
#include "io/request_ledger.h"

namespace sluice {

// One system call for the next attempt at `request`. Returns the bytes moved, or -errno.
std::int64_t attempt_blocking(const IoRequest& request);

// Repeats attempts until the request has ended, and counts each in `ledger`.
// Requires: begin_transfer(request).
void transfer_blocking(IoRequest& request, RequestLedger& ledger);

}  // namespace sluice
