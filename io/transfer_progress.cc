#include "io/transfer_progress.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <limits>

#include <sluice/error.h>
#include "base/aligned_buffer.h"
#include "io/errno_action.h"

namespace sluice {
namespace {

// Bytes that need not be moved again. A page is a multiple of every alignment that blocks are laid
// out for.
std::uint64_t settled_bytes(const IoRequest& request) {
  return request.transferred_bytes / kPageBytes * kPageBytes;
}

TransferStep end_transfer(IoRequest& request, std::int64_t error) {
  request.error = static_cast<int>(error);
  return TransferStep::kEnded;
}

}  // namespace

// Relaxed: the time says nothing about the request's other members.
void note_start(IoRequest& request, std::uint64_t now_ns) {
  std::atomic_ref started(request.started_ns);
  if (started.load(std::memory_order_relaxed) == 0)
    started.store(now_ns, std::memory_order_relaxed);
}

bool has_started(const IoRequest& request) {
  // C++20 has no atomic_ref to const; this one only loads.
  std::atomic_ref started(const_cast<std::uint64_t&>(request.started_ns));
  return started.load(std::memory_order_relaxed) != 0;
}

void begin_transfer(IoRequest& request) {
  constexpr std::uint64_t kFileBytesMax = std::numeric_limits<std::int64_t>::max();
  SLUICE_CHECK(request.on_complete != nullptr, "a request needs on_complete");
  SLUICE_CHECK(request.data != nullptr || request.length_bytes == 0, "a request needs data");
  SLUICE_CHECK(request.kind != IoKind::kFlush || request.length_bytes == 0,
               "a flush is about the whole file");
  SLUICE_CHECK(request.offset_bytes <= kFileBytesMax &&
                   request.length_bytes <= kFileBytesMax - request.offset_bytes,
               "a request must end below 2^63");
  request.error = 0;
  request.transferred_bytes = 0;
  request.attempts = 0;
  std::atomic_ref(request.started_ns).store(0, std::memory_order_relaxed);
  request.moved_ns = 0;
}

TransferAttempt next_attempt(const IoRequest& request) {
  const std::uint64_t settled = settled_bytes(request);
  return {.offset_bytes = request.offset_bytes + settled,
          .data = request.data + settled,
          .length_bytes = std::min(request.length_bytes - settled, kAttemptBytesMax)};
}

TransferStep advance_transfer(IoRequest& request, std::int64_t result) {
  if (result >= 0) {
    const auto moved = static_cast<std::uint64_t>(result);
    SLUICE_CHECK(moved <= next_attempt(request).length_bytes,
                 "the kernel moved more bytes than it was asked for");
    const std::uint64_t reached = settled_bytes(request) + moved;
    if (reached == request.length_bytes) {
      request.transferred_bytes = reached;
      return end_transfer(request, 0);
    }
    if (reached > request.transferred_bytes) {
      request.transferred_bytes = reached;
      request.attempts = 0;
      return TransferStep::kResume;
    }
    if (moved == 0 && request.kind == IoKind::kRead) return end_transfer(request, EIO);
  } else if (errno_rule(request.kind, static_cast<int>(-result)).action != ErrnoAction::kRetry) {
    return end_transfer(request, -result);
  }
  if (request.attempts == kRetriesMax) return end_transfer(request, result < 0 ? -result : EIO);
  ++request.attempts;
  return TransferStep::kRetry;
}

}  // namespace sluice
