// The status page of a running process: one page of memory in $XDG_RUNTIME_DIR/sluice/PID, mode
// 0600, which the process writes after every step and `sluice top` reads. The format is private to
// one version of Sluice. Reading needs no lock: a sequence counter is odd while the writer is at
// work, and a checksum tells a damaged page. The writer holds a lock (flock) on the file for as
// long as it lives, so that a page whose process was killed is known as such, also from another
// process namespace or after its number has come again.
//
// Thread rule: one thread writes; read_status_pages() from any.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <sluice/memory_marks.h>
#include <sluice/step_report.h>
#include "base/unique_fd.h"

namespace sluice {

enum class RunPhase : std::uint32_t { kStarting, kTraining, kEvaluating, kSaving };
std::string_view name_of(RunPhase phase);

// Bytes that a link or the drives have moved in the last step, and how long they were busy with it,
// summed over transfers under way at once.
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
// "storage_read": as in JSON and Prometheus.
std::string_view name_of(StatusLink link);

struct TierStatus {
  std::uint64_t pool_bytes;    // planned
  std::uint64_t budget_bytes;  // 0 for storage
  std::uint64_t in_use_bytes;  // the most at any one time since the step before the last
};

// Plain bytes, without pointers. Times are those of the last step; a rank's own, without others'.
struct RunStatus {
  std::uint32_t pid;
  std::uint32_t rank;
  std::uint32_t ranks;
  RunPhase phase;
  std::int64_t started_unix_ns;
  std::int64_t updated_unix_ns;
  std::uint64_t step;    // that have ended, also before this run; 0 = none
  std::uint64_t steps;   // that there will be
  std::uint64_t tokens;  // of a step, of all ranks
  double loss;
  double gradient_norm;
  double step_s;
  double flops_per_token;  // of the model; 0 = not known
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

  double tokens_per_s() const { return step_s > 0 ? static_cast<double>(tokens) / step_s : 0; }
  // All ranks together.
  double flops_per_s() const { return flops_per_token * tokens_per_s(); }
  // The reason that computation waited for most in the last step.
  TraceReason longest_wait() const;
};
static_assert(std::is_trivially_copyable_v<RunStatus> && sizeof(RunStatus) < 3072);

class StatusPage {
 public:
  // Makes the page, and the folder where it is missing, and removes a dead process's page of this
  // number. `folder` empty: no page, and the calls below do nothing.
  // Fails with: kIo, naming the file; then there is no page either.
  explicit StatusPage(const std::string& folder);
  // Removes it.
  ~StatusPage();
  StatusPage(const StatusPage&) = delete;
  StatusPage& operator=(const StatusPage&) = delete;

  bool is_there() const { return memory_ != nullptr; }
  // Writes `status`, with pid, start time and the time of now.
  void write(RunStatus status) noexcept;

 private:
  std::string path_;
  UniqueFd file_;
  std::byte* memory_ = nullptr;
  std::int64_t started_unix_ns_ = 0;
};

// $XDG_RUNTIME_DIR/sluice; empty where that is not set.
std::string status_folder();

struct FoundPage {
  std::string name;  // of the file
  bool is_alive = false;
  std::string problem;              // why the page is not to be trusted; then there is no status
  std::optional<RunStatus> status;  // of a dead process: its last one
};

// All pages in `folder`, by number. A page of a dead process is removed when it has been read once;
// a file that is no page, another user's or another version's is left alone.
std::vector<FoundPage> read_status_pages(const std::string& folder);

}  // namespace sluice
