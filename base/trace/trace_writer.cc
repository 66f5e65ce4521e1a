#include "base/trace/trace_writer.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <new>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/file_flush.h"
#include "base/named_thread.h"

namespace sluice {
namespace {

constexpr std::size_t kBufferBytes = 1 << 20;
constexpr int kRoundsMax = 8;
constexpr std::uint64_t kCalibrationPeriodNs = 1'000'000'000;

ProcessFd file_of(const TraceOptions& options) {
  const std::string& path = options.file;
  const bool is_open = options.descriptor >= 0;
  const int descriptor = is_open
                             ? ::fcntl(options.descriptor, F_DUPFD_CLOEXEC, 0)
                             : ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  const int error = errno;
  if (descriptor < 0)
    throw Error(file_error_code(error, ErrorCode::kInput),
                fmt::format("cannot write the trace \"{}\": {}; {}", path, errno_text(error),
                            file_remedy(error)));
  ProcessFd file(descriptor);
  // The file may hold names of tensors and paths, so only its owner may read it, even if it existed
  // before. A file that is not regular (/dev/null) keeps its mode.
  struct stat status {};
  if (!is_open && ::fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode))
    (void)::fchmod(descriptor, 0600);
  return file;
}

// A pipe whose reader has gone ends with an error, also in a program that does not ignore SIGPIPE.
ssize_t write_without_signal(int descriptor, std::span<const std::byte> bytes) {
  sigset_t signal, before, pending;
  sigemptyset(&signal);
  sigaddset(&signal, SIGPIPE);
  ::pthread_sigmask(SIG_BLOCK, &signal, &before);
  ::sigpending(&pending);
  const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
  const int error = errno;
  if (written < 0 && error == EPIPE && sigismember(&pending, SIGPIPE) == 0) {
    const timespec no_wait{};
    while (::sigtimedwait(&signal, nullptr, &no_wait) < 0 && errno == EINTR) continue;
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  errno = error;
  return written;
}

}  // namespace

TraceWriter::TraceWriter(const TraceOptions& options)
    : path_(options.file), file_(file_of(options)), records_(kTraceBlockRecordsMax) {
  add_section("sluice-trace", trace_description(options));
  thread_ = start_thread("sluice-trace", [this] { run(); });
}

TraceWriter::~TraceWriter() {
  (void)finish();
}

void TraceWriter::add_ring(std::shared_ptr<TraceRing> ring) {
  const std::scoped_lock lock(mutex_);
  added_.push_back(std::move(ring));
}

void TraceWriter::add_section(std::string_view name, std::string_view text) {
  SLUICE_CHECK(name.size() <= kTraceNameBytes, "a section of a trace has a short name");
  if (text.size() > kTraceSectionBytesMax) return;
  TraceBlockHeader header;
  header.type = static_cast<std::uint32_t>(TraceBlockType::kSection);
  header.count = static_cast<std::uint32_t>(text.size());
  const std::scoped_lock lock(file_mutex_);
  add_block(header, name, std::as_bytes(std::span(text)));
  flush();
}

TraceResult TraceWriter::finish(std::uint64_t lost_without_ring) {
  if (!thread_.joinable()) return result_;
  {
    const std::scoped_lock lock(mutex_);
    is_stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
  result_.lost = lost_by_ended_ + lost_without_ring;
  for (const auto& ring : rings_) result_.lost += ring->lost();
  if (lost_without_ring != 0) count_lost(lost_without_ring);
  add_section("end", fmt::format(R"({{"records": {}, "lost": {}, "drainer_ns": {}}})",
                                 result_.records, result_.lost, result_.drainer_ns));
  if (const int error = closing_error(file_.get()); error != 0) fail(error);
  file_ = ProcessFd();
  return result_;
}

// For readers, which add up what the blocks of each thread say.
void TraceWriter::count_lost(std::uint64_t lost_without_ring) {
  TraceBlockHeader header;
  header.type = static_cast<std::uint32_t>(TraceBlockType::kRecords);
  header.lost = lost_without_ring;
  header.thread = UINT32_MAX;
  const std::scoped_lock lock(file_mutex_);
  add_block(header, "no memory", {});
}

void TraceWriter::run() {
  std::uint64_t calibrated_ns = steady_now_ns();
  bool is_last = false;
  while (!is_last) {
    {
      std::unique_lock lock(mutex_);
      is_last = wake_.wait_for(lock, kDrainPeriod, [this] { return is_stopping_; });
    }
    run_trace_polls();
    // A ring that fills quickly gets no pause.
    try {
      while (drain_all()) {
      }
    } catch (const std::bad_alloc&) {
      const std::scoped_lock lock(file_mutex_);
      fail(ENOMEM);
    }
    if (steady_now_ns() - calibrated_ns < kCalibrationPeriodNs) continue;
    calibrate_trace_clock();
    calibrated_ns = steady_now_ns();
  }
  timespec used{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  result_.drainer_ns = static_cast<std::uint64_t>(used.tv_sec) * 1'000'000'000 +
                       static_cast<std::uint64_t>(used.tv_nsec);
}

// Returns whether a ring is filling faster than the pauses allow.
bool TraceWriter::drain_all() {
  {
    const std::scoped_lock lock(mutex_);
    rings_.insert(rings_.end(), added_.begin(), added_.end());
    added_.clear();
  }
  bool is_busy = false;
  const std::scoped_lock lock(file_mutex_);
  for (const auto& ring : rings_) {
    is_busy = is_busy || ring->waiting() > ring->capacity() / 4;
    drain(*ring);
  }
  std::erase_if(rings_, [this](const auto& ring) {
    const bool is_over = ring->is_closed() && ring->waiting() == 0;
    if (is_over) lost_by_ended_ += ring->lost();
    return is_over;
  });
  flush();
  return is_busy;
}

void TraceWriter::drain(TraceRing& ring) {
  // Drains until the ring is empty, because its first places are then reused and no fresh memory is
  // touched; each round takes what came during the one before. The rounds are bounded, so that one
  // busy thread does not keep the others waiting.
  for (int round = 0; round < kRoundsMax && ring.waiting() > 0; ++round) {
    for (std::uint64_t left = ring.waiting(); left > 0;) {
      const std::size_t taken = ring.drain(records_);
      TraceBlockHeader header;
      header.type = static_cast<std::uint32_t>(TraceBlockType::kRecords);
      header.count = static_cast<std::uint32_t>(taken);
      header.lost = ring.lost();
      header.thread = ring.thread();
      add_block(header, ring.name(), std::as_bytes(std::span(records_.data(), taken)));
      left -= std::min<std::uint64_t>(left, taken);
    }
  }
}

// Requires: file_mutex_.
void TraceWriter::add_block(TraceBlockHeader header, std::string_view name,
                            std::span<const std::byte> payload) {
  std::memcpy(header.name, name.data(), std::min(name.size(), kTraceNameBytes));
  header.payload_bytes = align_up(payload.size(), kTraceAlignBytes);
  const std::size_t begin = buffer_.size();
  buffer_.resize(begin + sizeof(header) + header.payload_bytes);
  const auto block = std::span(buffer_).subspan(begin);
  if (!payload.empty()) std::memcpy(block.data() + sizeof(header), payload.data(), payload.size());
  header.checksum = trace_checksum(header, block.subspan(sizeof(header)));
  std::memcpy(block.data(), &header, sizeof(header));
  if (header.type == static_cast<std::uint32_t>(TraceBlockType::kRecords))
    records_buffered_ += header.count;
  if (buffer_.size() >= kBufferBytes) flush();
}

// Requires: file_mutex_.
void TraceWriter::flush() {
  write_all(buffer_);
  if (result_.failure.empty()) result_.records += records_buffered_;
  buffer_.clear();
  records_buffered_ = 0;
}

// The first failure is kept.
void TraceWriter::fail(int error) {
  if (!result_.failure.empty()) return;
  result_.error = error;
  result_.failure =
      fmt::format("the trace \"{}\" ends at {}: {}; {}", path_, format_bytes(result_.file_bytes),
                  errno_text(error), file_remedy(error));
}

void TraceWriter::write_all(std::span<const std::byte> bytes) {
  if (!result_.failure.empty()) return;
  while (!bytes.empty()) {
    const ssize_t written = write_without_signal(file_.get(), bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return fail(errno);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    result_.file_bytes += static_cast<std::uint64_t>(written);
  }
}

}  // namespace sluice
