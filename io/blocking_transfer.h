// These functions run a whole transfer or flush on the calling thread. A transfer uses pread or
// pwrite, and a flush uses fdatasync. The functions follow the rules of transfer_progress.h. Both
// sync_queue and thread_queue use these functions.
// Thread rule: any thread. The request belongs to the caller.
#pragma once

#include <cstdint>

#include "io/io_queue.h"
#include "io/request_ledger.h"

namespace sluice {

// Makes one attempt at `request`, with one system call. Returns the number of bytes moved, or
// -errno.
std::int64_t attempt_blocking(const IoRequest& request);

// Repeats attempts until the request has ended, and counts each attempt in `ledger`.
// Requires: begin_transfer(request) has been called.
void transfer_blocking(IoRequest& request, RequestLedger& ledger);

}  // namespace sluice
