// IoBench measures the drives behind storage paths. The drives work under the same conditions as in
// the engine: scratch files without a name, O_DIRECT, an arena on huge pages, and one queue. Every
// page contains a stamp, which is the page's position and version. Every read checks the stamps,
// because a measured rate is worthless if the bytes are wrong.
//
// Thread rule: one thread uses an IoBench. Completions come from the queue's threads.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/aligned_buffer.h"
#include "io/direct_file.h"
#include "io/io_queue.h"

namespace sluice {

enum class IoPattern : std::uint8_t {
  kRead,   // front to back
  kWrite,  // front to back; overwrites existing data
  kMixed,  // as in the optimizer: each block is read, then overwritten
};

std::string_view name_of(IoPattern pattern);

struct IoCase {
  IoPattern pattern = IoPattern::kRead;
  std::uint64_t request_bytes = 0;  // a multiple of 4096
  std::uint32_t depth = 0;          // requests in flight
  // The number of the path that is measured alone. If `drive` is empty, all paths are measured at
  // the same time.
  std::optional<std::uint32_t> drive = std::nullopt;
};

struct IoMeasurement {
  double seconds = 0;
  double cpu_seconds = 0;   // of this process, user and system
  std::uint64_t bytes = 0;  // bytes read plus bytes written
};

struct IoBenchOptions {
  std::vector<std::string> paths;  // requests use the paths in turn
  std::uint64_t file_bytes = 0;    // size of each path's file, rounded down to whole requests
  std::uint64_t request_bytes_max = 0;
  std::uint32_t depth_max = 0;
};

class IoBench {
 public:
  using OpenQueue = std::function<std::unique_ptr<IoQueue>(std::span<std::byte> memory,
                                                           std::span<const int> files)>;

  // Creates the files, and writes every byte once. The first write to new space takes longer than
  // later writes, so the first write must not be measured. `open_queue` receives the buffers and
  // files of all requests. The returned queue must have a depth of at least depth_max.
  // Fails with kNoSpace, kInput or kIo if a file cannot be made or written. Fails with kOutOfMemory
  // if there is not enough memory for the buffers.
  IoBench(const IoBenchOptions& options, const OpenQueue& open_queue);
  ~IoBench();
  IoBench(const IoBench&) = delete;
  IoBench& operator=(const IoBench&) = delete;

  // Reads or writes the files once. `io_case` gives the pattern, the request size and the depth.
  // Fails with kIo if a request fails. Fails with kDamaged if a page does not begin with the stamp
  // that was written.
  IoMeasurement measure(const IoCase& io_case);

  std::string_view queue_name() const { return queue_->name(); }
  bool is_direct() const;

 private:
  // One request in flight and the request's buffer. The bench's thread owns the slot while the
  // request is not in flight.
  struct Slot {
    IoRequest request;
    IoBench* bench = nullptr;
    std::uint64_t index = 0;  // the request's number in the pass
    std::uint32_t file = 0;
  };

  void start(Slot& slot, const IoCase& io_case, IoKind kind);
  bool start_next(Slot& slot, const IoCase& io_case);
  void finish(Slot& slot, const IoCase& io_case);
  void stamp(const Slot& slot) const;
  void check(const Slot& slot) const;
  Slot& await_completion();

  IoBenchOptions options_;
  std::vector<DirectFile> files_;
  AlignedBuffer arena_;
  std::vector<Slot> slots_;
  std::vector<std::uint64_t> versions_;  // for every page of each file; valid between passes
  std::uint64_t next_request_ = 0;
  std::uint64_t requests_ = 0;  // in one pass

  // `mutex_` guards `ended_`.
  std::mutex mutex_;
  std::condition_variable completed_;
  std::vector<Slot*> ended_;

  std::unique_ptr<IoQueue> queue_;  // declared last, because its callbacks use the members above
};

}  // namespace sluice
