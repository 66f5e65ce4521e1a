// Decides what a queue does with a request after one attempt at it: the rules of io_queue.h about
// short transfers, EINTR, EAGAIN and the end of the file, in one place for every queue. Kernels
// rarely give short transfers, so these are functions of their arguments alone and can be tested
// case by case.
//
// Thread rule: pure; the request belongs to the caller.
// Invariant: every attempt begins a whole number of pages after the request's start, so that it is
// as aligned for O_DIRECT as the request itself.
#pragma once

#include <cstddef>
#include <cstdint>

#include "io/io_queue.h"

namespace sluice {

// Retries in a row without any progress; one more ends the request.
inline constexpr std::uint32_t kRetriesMax = 16;

// One attempt moves at most this much: the kernel cuts at 2 GiB less a page, and io_uring's length
// has 32 bits. Larger requests continue as short transfers do.
inline constexpr std::uint64_t kAttemptBytesMax = std::uint64_t{1} << 30;

enum class TransferStep : std::uint8_t {
  kEnded,   // error and transferred_bytes are final
  kResume,  // some bytes came: attempt the rest
  kRetry,   // nothing came: attempt the same again
};

// The next range to ask the kernel for.
struct TransferAttempt {
  std::uint64_t offset_bytes = 0;
  std::byte* data = nullptr;
  std::uint64_t length_bytes = 0;
};

// note_start() says that the request goes to the kernel at `now_ns`; only the first call counts.
// has_started() may run on a thread other than the queue's.
void note_start(IoRequest& request, std::uint64_t now_ns);
bool has_started(const IoRequest& request);

// Resets the results of `request`, for a new request or one used again. Checks what no kernel would
// notice: a missing callback or buffer, a range beyond 2^63 (to io_uring, offset -1 would mean "the
// current position"), a flush of a part.
void begin_transfer(IoRequest& request);

// Returns the next attempt: the rest of the request. After a short transfer that ended inside a
// page, that page is moved again, because O_DIRECT refuses to begin there.
//   length 16384, 5000 bytes transferred -> [+4096, +12288)
TransferAttempt next_attempt(const IoRequest& request);

// Records the result of next_attempt(request): `result` is the number of bytes moved, or -errno.
//   all bytes moved                         kEnded, error 0
//   further than before                     kResume
//   a read of 0 bytes: the file's end       kEnded, EIO
//   no further than before, or an errno
//     that errno_action.h retries         kRetry; after kRetriesMax in a row kEnded, EIO or errno
//   any other errno                         kEnded, errno
TransferStep advance_transfer(IoRequest& request, std::int64_t result);

}  // namespace sluice
