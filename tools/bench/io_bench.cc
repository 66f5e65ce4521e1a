#include "tools/bench/io_bench.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>

namespace sluice {
namespace {

// At the front of every page.
struct Stamp {
  std::uint64_t page = 0;  // of the file
  std::uint64_t file = 0;
  std::uint64_t version = 0;
  bool operator==(const Stamp&) const = default;
};

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

}  // namespace

std::string_view name_of(IoPattern pattern) {
  switch (pattern) {
    case IoPattern::kRead: return "read";
    case IoPattern::kWrite: return "write";
    case IoPattern::kMixed: break;
  }
  return "mixed";
}

IoBench::IoBench(const IoBenchOptions& options, const OpenQueue& open_queue)
    : options_(options),
      arena_(options.request_bytes_max * options.depth_max, "the benchmark's buffers"),
      slots_(options.depth_max),
      versions_(options.paths.size(), 0) {
  options_.file_bytes = options_.file_bytes / options.request_bytes_max * options.request_bytes_max;
  SLUICE_CHECK(options_.file_bytes != 0, "a file holds at least one request");
  for (const std::string& path : options_.paths)
    files_.push_back(DirectFile::create_scratch(path, options_.file_bytes));
  std::vector<int> descriptors;
  for (const DirectFile& file : files_) descriptors.push_back(file.descriptor());
  queue_ = open_queue(arena_.span(), descriptors);
  (void)measure({.pattern = IoPattern::kWrite,
                 .request_bytes = options.request_bytes_max,
                 .depth = options.depth_max});
}

// After a failure requests may still be in flight, and their callbacks use the members.
IoBench::~IoBench() {
  queue_->wait_idle();
}

bool IoBench::is_direct() const {
  return std::ranges::all_of(files_, [](const DirectFile& file) { return file.is_direct(); });
}

IoMeasurement IoBench::measure(const IoCase& io_case) {
  SLUICE_CHECK(io_case.depth <= slots_.size() &&
                   io_case.request_bytes <= options_.request_bytes_max &&
                   is_aligned(io_case.request_bytes, kPageBytes),
               "a case stays within the benchmark's buffers");
  const std::size_t file_count = io_case.drive ? 1 : files_.size();
  requests_ = options_.file_bytes / io_case.request_bytes * file_count;
  next_request_ = 0;
  const double cpu_begin = cpu_seconds();
  const auto begin = std::chrono::steady_clock::now();
  std::uint32_t in_flight = 0;
  for (std::uint32_t i = 0; i < io_case.depth; ++i) {
    Slot& slot = slots_[i];
    slot.bench = this;
    slot.request.data = arena_.data() + i * options_.request_bytes_max;
    if (start_next(slot, io_case)) ++in_flight;
  }
  while (in_flight != 0) {
    Slot& slot = await_completion();
    finish(slot, io_case);
    if (io_case.pattern == IoPattern::kMixed && slot.request.kind == IoKind::kRead) {
      start(slot, io_case, IoKind::kWrite);
    } else if (!start_next(slot, io_case)) {
      --in_flight;
    }
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  for (std::size_t file = 0; file < files_.size(); ++file) {
    if (io_case.pattern != IoPattern::kRead && file == io_case.drive.value_or(file))
      ++versions_[file];
  }
  return {.seconds = elapsed.count(),
          .cpu_seconds = cpu_seconds() - cpu_begin,
          .bytes =
              requests_ * io_case.request_bytes * (io_case.pattern == IoPattern::kMixed ? 2u : 1u)};
}

bool IoBench::start_next(Slot& slot, const IoCase& io_case) {
  if (next_request_ == requests_) return false;
  slot.index = next_request_++;
  start(slot, io_case, io_case.pattern == IoPattern::kWrite ? IoKind::kWrite : IoKind::kRead);
  return true;
}

void IoBench::start(Slot& slot, const IoCase& io_case, IoKind kind) {
  IoRequest& request = slot.request;
  const std::size_t file_count = io_case.drive ? 1 : files_.size();
  slot.file = io_case.drive.value_or(static_cast<std::uint32_t>(slot.index % file_count));
  request.kind = kind;
  request.drive = slot.file;
  request.descriptor = files_[slot.file].descriptor();
  request.offset_bytes = slot.index / file_count * io_case.request_bytes;
  request.length_bytes = io_case.request_bytes;
  request.context = &slot;
  request.on_complete = [](IoRequest& done) {
    auto* ended = static_cast<Slot*>(done.context);
    IoBench* bench = ended->bench;
    const std::scoped_lock lock(bench->mutex_);
    bench->ended_.push_back(ended);
    bench->completed_.notify_one();
  };
  if (kind == IoKind::kWrite) stamp(slot);
  IoRequest* const submitted = &request;
  queue_->submit({&submitted, 1});
}

IoBench::Slot& IoBench::await_completion() {
  std::unique_lock lock(mutex_);
  completed_.wait(lock, [this] { return !ended_.empty(); });
  Slot& slot = *ended_.back();
  ended_.pop_back();
  return slot;
}

void IoBench::finish(Slot& slot, const IoCase& io_case) {
  const IoRequest& request = slot.request;
  if (request.error != 0) {
    throw Error(
        ErrorCode::kIo,
        fmt::format("{} of {} [{}, +{}) failed: {}; check the drive (smartctl, dmesg)",
                    request.kind == IoKind::kRead ? "read" : "write", files_[slot.file].name(),
                    request.offset_bytes, io_case.request_bytes, errno_text(request.error)));
  }
  if (request.kind == IoKind::kRead) check(slot);
}

void IoBench::stamp(const Slot& slot) const {
  const IoRequest& request = slot.request;
  for (std::uint64_t at = 0; at < request.length_bytes; at += kPageBytes) {
    const Stamp stamp{.page = (request.offset_bytes + at) / kPageBytes,
                      .file = slot.file,
                      .version = versions_[slot.file] + 1};
    std::memcpy(request.data + at, &stamp, sizeof(stamp));
  }
}

void IoBench::check(const Slot& slot) const {
  const IoRequest& request = slot.request;
  for (std::uint64_t at = 0; at < request.length_bytes; at += kPageBytes) {
    const Stamp expected{.page = (request.offset_bytes + at) / kPageBytes,
                         .file = slot.file,
                         .version = versions_[slot.file]};
    Stamp found;
    std::memcpy(&found, request.data + at, sizeof(found));
    if (found == expected) continue;
    throw Error(
        ErrorCode::kDamaged,
        fmt::format("read of {} at {}: expected page {} of file {} at version {}, found "
                    "page {} of file {} at version {}; check the drive (smartctl, dmesg)",
                    files_[expected.file].name(), request.offset_bytes + at, expected.page,
                    expected.file, expected.version, found.page, found.file, found.version));
  }
}

}  // namespace sluice
