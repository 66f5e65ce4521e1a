// The seam between Sluice and the kernel's storage I/O: requests go in, and completions come back
// on a thread that the queue chooses. There are three versions: sync_queue (plain pread and pwrite,
// the reference), thread_queue (the same calls on threads, where io_uring is not allowed) and
// uring_queue (io_uring). drive_queues combines several, one per drive.
//
// Thread rule: submit() and wait_idle() may be called from any thread. Completion callbacks run on
// the queue's owner thread (uring_queue), on its workers, several at once (thread_queue), or inside
// submit() (sync_queue). They may compute (a checksum, say), but must not block for long, and must
// not submit to the same queue.
// Invariants: every request completes exactly once, with all of its bytes moved or with an errno.
// Short transfers are resumed, EINTR and EAGAIN are retried a bounded number of times; a read that
// meets the end of the file gives EIO. Among waiting requests, those of higher priority start
// first, and those of one priority in the order they came; none starves (pending_list.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace sluice {

// kFlush makes the data written to the file durable (fdatasync).
enum class IoKind : std::uint8_t { kRead, kWrite, kFlush };

// The order of requests while a queue has more than it can start. Once a request is in the kernel,
// the kernel decides.
enum class IoPriority : std::uint8_t { kHigh, kNormal, kLow };
inline constexpr std::size_t kIoPriorities = 3;

// One transfer, or one flush. The caller owns it; the request and `data` stay where they are,
// untouched, until on_complete has been called. For files opened with O_DIRECT, offset, length and
// address are multiples of DirectFile::alignment_bytes().
// A flush has neither data nor length. It covers the writes to its file that had completed, on any
// queue, when it was submitted, and no others. After a flush has failed, later ones prove nothing:
// the kernel may have dropped the pages.
struct IoRequest {
  IoKind kind = IoKind::kRead;
  IoPriority priority = IoPriority::kNormal;
  std::uint32_t drive = 0;  // which of drive_queues' queues; other queues ignore it
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
  std::uint64_t started_ns = 0;         // trace_now_ns() when the drive was first asked,
  std::uint64_t moved_ns = 0;           // and when it had moved the last byte

  // Used by the queue while the request is in flight.
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

  // Counts successful transfers so far, with the bytes that the caller asked for.
  virtual IoCounters counters() const = 0;

  virtual std::string_view name() const = 0;

  // Says what this queue cannot use on this machine, and why, in a line for the user; else empty.
  virtual std::string_view note() const { return {}; }
};

struct IoQueueOptions {
  std::uint32_t depth = 64;  // requests in the kernel at once, 1..4096
  // Further requests that submit() accepts before it blocks; 0 = as many as `depth`. The engine
  // asks for room for everything that it can have in flight, so that its scheduler never waits for
  // a drive.
  std::uint32_t backlog = 0;
  // Memory that most requests use. uring_queue has the kernel pin it once instead of for every
  // request; where the kernel refuses, note() says so and nothing else changes. Must outlive the
  // queue.
  std::span<std::byte> memory = {};
  // Descriptors of the files that most requests use, registered likewise. They must stay open while
  // the queue lives.
  std::span<const int> files = {};
};

// The reference: moves the bytes inside submit() and ignores the depth.
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

// One queue per drive, so that each drive is kept busy by its own thread and none waits for a
// slower one: a request goes to queue `drive`.
// Requires: at least one; each request's `drive` is one of them.
std::unique_ptr<IoQueue> make_drive_queues(std::vector<std::unique_ptr<IoQueue>> drives);

}  // namespace sluice
