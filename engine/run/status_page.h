// The status page of a running process is one page of memory. The page lies in the file
// $XDG_RUNTIME_DIR/sluice/PID, which has mode 0600. The process writes this page after every step,
// and `sluice top` reads the page. The format is private to one version of Sluice. Reading needs no
// lock. A sequence counter is odd during a write. A checksum detects a damaged page. The writer
// holds a lock (flock) on the file until the process ends. So a reader recognizes the page of a
// killed process. The lock also works if the reader is in another process namespace, or if the
// process number is in use again. A forked child does not keep the lock. A forked child does not
// write or remove the page of its parent.
//
// Thread rule: one thread writes. Any thread may call read_status_pages().
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <sluice/memory_marks.h>
#include <sluice/status_publisher.h>
#include <sluice/step_report.h>
#include "base/process_fd.h"

namespace sluice {

// The traffic of a link in the last step. All drives together count as one link for reads and one
// link for writes. busy_ns is the sum of the times of all transfers, even if transfers overlap in
// time.
struct LinkStatus {
  std::uint64_t size_bytes;
  std::uint64_t busy_ns;
};

enum class StatusLink : std::uint8_t {
  kStorageRead,
  kStorageWrite,
  kCopyToDevice,
  kCopyFromDevice
};
inline constexpr std::size_t kStatusLinks = 4;
// Returns the name of the link in JSON and for Prometheus, such as "storage_read".
std::string_view name_of(StatusLink link);

// The bytes that one path of storage.paths has moved in the last step.
struct DriveStatus {
  std::array<char, 64> path;  // ends with a zero; only the end of a longer path is kept
  std::uint64_t read_bytes;
  std::uint64_t write_bytes;

  std::string_view name() const;
};
// The largest number of drives on a page. Further drives are counted only in the totals of the
// links.
inline constexpr std::size_t kStatusDrives = 16;

struct TierStatus {
  std::uint64_t pool_bytes;    // planned
  std::uint64_t budget_bytes;  // 0 for storage
  std::uint64_t in_use_bytes;  // the peak between the ends of the last two steps
};

// The struct contains plain bytes, without pointers. All times are times of the last step on this
// rank.
struct RunStatus {
  std::uint32_t pid;
  std::uint32_t rank;
  std::uint32_t ranks;
  RunPhase phase;
  std::int64_t started_unix_ns;
  std::int64_t updated_unix_ns;
  std::uint64_t step;    // number of ended steps, including earlier runs; 0 = none
  std::uint64_t steps;   // the number of steps planned; 0 = unknown
  std::uint64_t tokens;  // of one step, over all ranks; 0 = unknown
  double loss;           // NaN = unknown
  double gradient_norm;
  double step_s;
  double flops_per_token;  // of the model; 0 = unknown
  double peak_flops;       // per second, of all ranks together; 0 = unknown
  std::int64_t total_ns;
  std::int64_t compute_ns;
  std::int64_t exposed_io_ns;
  std::int64_t exposed_optimizer_ns;
  std::int64_t other_ns;
  std::array<std::int64_t, kTraceReasons> wait_ns;
  std::uint64_t gathered_bytes;
  std::uint64_t reduced_bytes;
  std::array<LinkStatus, kStatusLinks> links;
  std::array<TierStatus, kTiers> tiers;
  std::array<DriveStatus, kStatusDrives> drives;
  std::uint32_t drive_count;

  double tokens_per_s() const { return step_s > 0 ? static_cast<double>(tokens) / step_s : 0; }
  // The rate of all ranks together.
  double flops_per_s() const { return flops_per_token * tokens_per_s(); }
  double mfu() const { return peak_flops > 0 ? flops_per_s() / peak_flops : 0; }
  // The reason that made computation wait longest in the last step. The result is kNone if
  // computation never waited.
  TraceReason longest_wait() const;
};
static_assert(std::is_trivially_copyable_v<RunStatus> && sizeof(RunStatus) < 3072);

class StatusPage {
 public:
  // The constructor makes the page. If the folder is missing, the constructor makes the folder,
  // too. If a dead process with the same process number has left a page, the constructor removes
  // that page. A live process with the same process number, such as one in another container, keeps
  // its page. If `folder` is empty, there is no page, and the functions below do nothing.
  // Fails with kIo. The message names the file. After a failure, there is no page.
  explicit StatusPage(const std::string& folder);
  // Removes the page.
  ~StatusPage();
  StatusPage(const StatusPage&) = delete;
  StatusPage& operator=(const StatusPage&) = delete;

  bool is_there() const { return memory_ != nullptr; }
  // Writes `status` with the pid, the start time and the current time. In a forked child, the call
  // does nothing.
  void write(RunStatus status) noexcept;

 private:
  std::string path_;
  pid_t owner_ = 0;
  ProcessFd file_;
  std::byte* memory_ = nullptr;
  std::int64_t started_unix_ns_ = 0;
};

// Returns $XDG_RUNTIME_DIR/sluice. The result is empty if the variable is not set.
std::string status_folder();

struct FoundPage {
  std::string name;  // of the file
  bool is_alive = false;
  std::string problem;              // why the page is unusable; if set, there is no status
  std::optional<RunStatus> status;  // of a dead process: its last status
};

// All pages in `folder`, sorted by process number. A page of a dead process is removed after one
// read. The function does not touch three kinds of files: files that are not pages, files of other
// users, and pages of other versions. A page that its process removes meanwhile is left out. A
// missing folder has no pages.
// Fails with kIo: the folder cannot be read.
std::vector<FoundPage> read_status_pages(const std::string& folder);

}  // namespace sluice
