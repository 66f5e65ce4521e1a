// The interface to the kernel's storage I/O.
// The caller submits requests. The queue reports completions on a thread that the queue chooses.
// - sync_queue is the reference queue, and makes plain calls of pread and pwrite.
// - thread_queue makes the same calls on threads, for machines that do not allow io_uring.
// - uring_queue uses io_uring.
// - drive_queues combines several queues, one per drive.
//
// Thread rule: submit() and wait_idle() may be called from any thread. Completion callbacks of
// uring_queue run on the queue's owner thread. Callbacks of thread_queue run on several worker
// threads at the same time. Callbacks of sync_queue run inside submit(). Callbacks may do
// computations, such as a checksum. Callbacks must not block for long, and must not submit to the
// queue that calls them.
// Invariants: every request completes exactly once. If a completed request has no errno, all of its
// bytes have moved. Short transfers are resumed. After EINTR and EAGAIN, a transfer is retried a
// limited number of times. A read that reaches the end of the file ends with EIO. A waiting request
// starts before all waiting requests of lower priority. Requests of the same priority start in the
// order of arrival. No request starves (pending_list.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace sluice {

// kFlush makes earlier writes to the file durable (fdatasync).
enum class IoKind : std::uint8_t { kRead, kWrite, kFlush };

// The order in which a queue starts requests when it cannot start all of them at once. Once a
// request is in the kernel, the kernel decides when to run it.
enum class IoPriority : std::uint8_t { kHigh, kNormal, kLow };
inline constexpr std::size_t kIoPriorities = 3;

// One transfer, or one flush. The caller owns the request. Until on_complete has been called, the
// caller must not move or change the request or `data`. For files opened with O_DIRECT, offset,
// length and address are multiples of DirectFile::alignment_bytes(). A flush has no data and no
// length. A flush covers each write to the same file, if the write had completed before the flush
// was submitted. The writes that a flush covers may come from any queue. A flush does not cover a
// write that completes after the flush was submitted. After a failed flush, the success of a later
// flush proves nothing, because the kernel may have dropped the pages.
struct IoRequest {
  IoKind kind = IoKind::kRead;
  IoPriority priority = IoPriority::kNormal;
  std::uint32_t drive = 0;  // the queue's number in drive_queues; ignored by other queues
  int descriptor = -1;
  std::uint64_t offset_bytes = 0;
  std::byte* data = nullptr;
  std::uint64_t length_bytes = 0;

  // The queue calls this function once, after `error` has been set. As soon as this call begins,
  // the request may be reused or freed.
  void (*on_complete)(IoRequest& request) = nullptr;
  void* context = nullptr;  // for on_complete; the queue does not touch it

  // The result of the request.
  int error = 0;                        // 0, or the errno that ended the transfer
  std::uint64_t transferred_bytes = 0;  // length_bytes when error is 0
  std::uint64_t started_ns = 0;         // trace_now_ns() when the drive was first asked
  std::uint64_t moved_ns = 0;           // trace_now_ns() after the drive's last byte

  // The queue uses the next members while the request is in flight.
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
  std::uint64_t resumed = 0;  // transfers that continued after a short attempt or after 1 GiB
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

  // Adds every request to the queue. sync_queue also completes every request during this call. The
  // call blocks while the queue is full. A queue no longer uses a request after the queue has
  // called on_complete.
  virtual void submit(std::span<IoRequest* const> requests) = 0;

  // Waits until all requests of earlier submit() calls have completed and their callbacks have
  // returned.
  virtual void wait_idle() = 0;

  // Returns the counts so far. For a successful transfer, the count of bytes is the length that the
  // caller asked for.
  virtual IoCounters counters() const = 0;
  // Returns the counts of the requests for drive number `drive` (IoRequest::drive). A queue that
  // does not distinguish drives counts every request as a request of drive 0.
  virtual IoCounters drive_counters(std::uint32_t drive) const {
    return drive == 0 ? counters() : IoCounters{};
  }

  virtual std::string_view name() const = 0;

  // Returns a line of text for the user. The line names a feature that this queue cannot use on
  // this machine, and gives the reason. The line is empty if there is no such feature.
  virtual std::string_view note() const { return {}; }
};

struct IoQueueOptions {
  std::uint32_t depth = 64;  // requests in the kernel at the same time, 1..4096
  // The number of further requests that submit() accepts before the call blocks. If the number is
  // 0, `depth` is used instead. The engine asks for enough room for all requests that can be in
  // flight at the same time. So the engine's scheduler never waits for a drive.
  std::uint32_t backlog = 0;
  // Memory that most requests use. With uring_queue, the kernel pins this memory only once, and not
  // again for every request. If the kernel refuses to pin the memory, note() gives the reason, and
  // nothing else changes. The memory must outlive the queue.
  std::span<std::byte> memory = {};
  // Descriptors of the files that most requests use. uring_queue registers these descriptors with
  // the kernel. The descriptors must stay open while the queue lives.
  std::span<const int> files = {};
};

// Makes the reference queue, which moves the bytes inside submit() and ignores the depth.
// Fails with kInvalidArgument if the depth is out of bounds.
std::unique_ptr<IoQueue> make_sync_queue(const IoQueueOptions& options);

// Makes a queue that calls pread and pwrite on min(depth, 32) threads.
// Fails with kInvalidArgument if the depth is out of bounds, and with kUnsupported if no thread can
// be started.
std::unique_ptr<IoQueue> make_thread_queue(const IoQueueOptions& options);

// Makes a queue that uses io_uring through liburing.
// Fails with kInvalidArgument if the depth is out of bounds, and with kUnsupported if the kernel
// refuses a ring. The message then has the errno and a remedy.
std::unique_ptr<IoQueue> make_uring_queue(const IoQueueOptions& options);

// Combines one queue per drive, so that each drive has its own thread and no drive waits for a
// slower drive. The member `drive` of a request is the index of the queue that gets the request.
// Requires: there is at least one queue, and each request's `drive` is the index of a queue.
std::unique_ptr<IoQueue> make_drive_queues(std::vector<std::unique_ptr<IoQueue>> drives);

}  // namespace sluice
