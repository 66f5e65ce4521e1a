// These functions decide what a queue does with a request after one attempt. All queues use the
// functions to follow the rules of io_queue.h about short transfers, EINTR, EAGAIN and the end of
// the file. The results of the functions depend only on the arguments. So tests can try each case,
// although kernels rarely produce short transfers.
//
// Thread rule: the functions are pure, and the request belongs to the caller.
// Invariant: the distance from the start of the request to the start of each attempt is a whole
// number of pages. So every attempt has the same alignment for O_DIRECT as the request.
#pragma once

#include <cstddef>
#include <cstdint>

#include "io/io_queue.h"

namespace sluice {

// The largest number of consecutive retries that make no progress. One more attempt without
// progress ends the request.
inline constexpr std::uint32_t kRetriesMax = 16;

// The largest number of bytes that one attempt moves. The kernel's limit is 2 GiB minus one page,
// and io_uring stores the length in 32 bits. A larger request is continued in the same way as a
// short transfer.
inline constexpr std::uint64_t kAttemptBytesMax = std::uint64_t{1} << 30;

enum class TransferStep : std::uint8_t {
  kEnded,   // error and transferred_bytes are final
  kResume,  // some bytes came, so attempt the rest
  kRetry,   // nothing came, so attempt the same again
};

// The range that the kernel should move next.
struct TransferAttempt {
  std::uint64_t offset_bytes = 0;
  std::byte* data = nullptr;
  std::uint64_t length_bytes = 0;
};

// The function records that the request goes to the kernel at `now_ns`. Only the first call for a
// request has an effect. Any thread may call has_started(), not only the queue's thread.
void note_start(IoRequest& request, std::uint64_t now_ns);
bool has_started(const IoRequest& request);

// Resets the results of a new or reused `request`. The function also checks for mistakes that no
// kernel would notice. Such mistakes are a missing callback or buffer, a range beyond 2^63, and a
// flush with a range. (For io_uring, offset -1 would mean "the current position".)
void begin_transfer(IoRequest& request);

// Returns the next attempt, which is the rest of the request. If a short transfer ended inside a
// page, the whole page is moved again, because O_DIRECT cannot begin inside a page.
//   length 16384, 5000 bytes transferred -> [+4096, +12288)
TransferAttempt next_attempt(const IoRequest& request);

// Records the result of the attempt that next_attempt(request) has returned. `result` is the number
// of bytes moved, or -errno.
//   all bytes moved                         kEnded, error 0
//   further than before                     kResume
//   a read of 0 bytes: the file's end       kEnded, EIO
//   no further than before, or an errno
//     that errno_action.h retries         kRetry; after kRetriesMax in a row kEnded, EIO or errno
//   any other errno                         kEnded, errno
TransferStep advance_transfer(IoRequest& request, std::int64_t result);

}  // namespace sluice
