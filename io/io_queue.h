// The seam between Sluice and the kernel's storage I/O: requests go in, completions come back on a
// thread of the queue's own choosing. Three versions: sync_queue (plain pread and pwrite, the
// reference), thread_queue (the same calls on threads, where io_uring is not allowed) and
// uring_queue (io_uring). drive_queues puts several together, one for each drive.
//
// Thread rule: submit() and wait_idle() may be called from any thread. Completion callbacks run on
// the queue's owner thread (uring_queue), on its workers, several at once (thread_queue), or inside
// submit() (sync_queue). They may compute (a checksum, say), but must not block for long, and must
// not submit to the same queue.
// Invariants: every request completes exactly once, with all of its bytes moved or with an errno.
// Short transfers are resumed, EINTR and EAGAIN are retried a bounded number of times; a read that
// meets the end of the file is EIO. Of requests that wait for their turn, those of higher priority
// start first, and those of one priority in the order they came; none starves (pending_list.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace sluice {

// kFlush: makes durable what has been written to the file (fdatasync).
enum class IoKind : std::uint8_t { kRead, kWrite, kFlush };

// Who goes first while a queue has more requests than it can start. Once the kernel has a request,
// the kernel decides.
enum class IoPriority : std::uint8_t { kHigh, kNormal, kLow };
inline constexpr std::size_t kIoPriorities = 3;

// One transfer, or one flush. The caller owns it; it and `data` stay where they are, untouched,
// until on_complete has been called. For files opened with O_DIRECT, offset, length and address are
// multiples of DirectFile::alignment_bytes().
// A flush has neither data nor length. It covers the writes to its file that had completed when it
// was submitted, on whichever queue, and says nothing of any other. After one that has failed, no
// later one proves anything: the kernel may have dropped the pages.
struct IoRequest {
  IoKind kind = IoKind::kRead;
  IoPriority priority = IoPriority::kNormal;
  std::uint32_t drive = 0;  // which of drive_queues' queues; of no consequence elsewhere
  int descriptor = -1;
  std::uint64_t offset_bytes = 0;
  std::byte* data = nullptr;
  std::uint64_t length_bytes = 0;

  // Called once, with `error` set. The request may be reused or freed from then on.
  void (*on_complete)(IoRequest& request) = nullptr;
  void* context = nullptr;  // for on_complete; the queue does not touch it

  // Results.
  int error = 0;                        // 0, or the errno that ended the transfer
  std::uint64_t transferred_bytes = 0;  // length_bytes when error is 0
  std::uint64_t started_ns = 0;         // trace_now_ns() when the drive was asked first,
  std::uint64_t moved_ns = 0;           // and when it had moved the last byte

  // The queue's own, while the request is in flight.
  std::uint32_t attempts = 0;
  std::uint64_t ticket = 0;
  IoRequest* next = nullptr;
};

struct IoCounters {
  std::uint64_t read_requests = 0;
  std::uint64_t read_bytes = 0;
  std::uint64_t write_requests = 0;
  std::uint64_t write_bytes = 0;
  std::uint64_t flush_requests = 0;
  std::uint64_t resumed = 0;  // short transfers, and those beyond 1 GiB, continued
  std::uint64_t retried = 0;  // EINTR, EAGAIN
  std::uint64_t failed = 0;

  IoCounters& operator+=(const IoCounters& other);
};

class IoQueue {
 public:
  IoQueue() = default;
  IoQueue(const IoQueue&) = delete;
  IoQueue& operator=(const IoQueue&) = delete;
  // Waits for the requests in flight.
  virtual ~IoQueue() = default;

  // Starts every request. On return they are in the queue (sync_queue: complete). Blocks while the
  // queue is full: that is back-pressure, not an error. Wait for on_complete of each.
  virtual void submit(std::span<IoRequest* const> requests) = 0;

  // Returns when every request submitted before the call has completed and its callback has
  // returned.
  virtual void wait_idle() = 0;

  // Successful transfers so far; bytes are those that the caller asked for.
  virtual IoCounters counters() const = 0;

  virtual std::string_view name() const = 0;

  // What this queue has to do without on this machine, and why, in a line for the user; else empty.
  virtual std::string_view note() const { return {}; }
};

struct IoQueueOptions {
  std::uint32_t depth = 64;  // requests in the kernel at once, 1..4096
  // Requests that submit() takes beyond those before it blocks; 0 = as many as `depth`. The engine
  // asks for room for all that it can have in flight, so that its scheduler never waits for a
  // drive.
  std::uint32_t backlog = 0;
  // Memory that most requests are about. A queue that can (uring_queue) has the kernel pin it once
  // instead of for every request; where the kernel refuses, note() says so and nothing else
  // changes. Must outlive the queue.
  std::span<std::byte> memory = {};
  // Likewise, descriptors of the files that most requests are about; they must stay open while the
  // queue lives.
  std::span<const int> files = {};
};

// The reference: moves the bytes inside submit(). The depth is of no consequence.
// Fails with: kInvalidArgument when the depth is out of bounds.
std::unique_ptr<IoQueue> make_sync_queue(const IoQueueOptions& options);

// pread and pwrite on min(depth, 32) threads.
// Fails with: kInvalidArgument when the depth is out of bounds; kUnsupported when no thread can be
// started.
std::unique_ptr<IoQueue> make_thread_queue(const IoQueueOptions& options);

// io_uring through liburing.
// Fails with: kInvalidArgument when the depth is out of bounds; kUnsupported when the kernel
// refuses a ring (the message carries the errno and a remedy).
std::unique_ptr<IoQueue> make_uring_queue(const IoQueueOptions& options);

// One queue a drive, so that each is kept busy by its own thread and none waits for a slower one:
// a request goes to queue `drive`.
// Requires: at least one; each request's `drive` is one of them.
std::unique_ptr<IoQueue> make_drive_queues(std::vector<std::unique_ptr<IoQueue>> drives);

}  // namespace sluice
