#include "tools/trace/trace_reader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/topology.h"
#include "base/trace/trace_format.h"
#include "base/unique_fd.h"
#include "base/untrusted_json.h"
#include "tools/trace/trace_open_spans.h"

namespace sluice {
namespace {

// A file in memory, not copied.
class MappedFile {
 public:
  MappedFile(const std::string& path, TraceSteps steps) {
    // O_NONBLOCK: opening a pipe without a writer would wait forever.
    const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    struct stat status {};
    if (!file || ::fstat(file.get(), &status) != 0) fail(path, errno_text(errno));
    if (!S_ISREG(status.st_mode)) fail(path, "it is not a regular file");
    size_bytes_ = static_cast<std::size_t>(status.st_size);
    if (size_bytes_ == 0) return;
    if (steps.are_all()) check_memory(path);
    const int populate = steps.are_all() ? MAP_POPULATE : 0;
    void* const mapped =
        ::mmap(nullptr, size_bytes_, PROT_READ, MAP_PRIVATE | populate, file.get(), 0);
    if (mapped == MAP_FAILED) fail(path, errno_text(errno));
    data_ = static_cast<const std::byte*>(mapped);
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile() {
    if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_bytes_);
  }

  std::span<const std::byte> bytes() const { return {data_, size_bytes_}; }

  // Gives back the memory of everything before `end`. The file has the bytes still.
  void forget_before(std::size_t end) {
    constexpr std::size_t kPieceBytes = 16u << 20;
    if (end - forgotten_ < kPieceBytes) return;
    const std::size_t aligned = end / kPieceBytes * kPieceBytes;
    (void)::madvise(const_cast<std::byte*>(data_) + forgotten_, aligned - forgotten_,
                    MADV_DONTNEED);
    forgotten_ = aligned;
  }

 private:
  [[noreturn]] static void fail(const std::string& path, const std::string& why) {
    throw Error(ErrorCode::kInput, fmt::format("cannot read the trace \"{}\": {}", path, why));
  }

  // Refuses a trace that is too large to be read whole: a page of so many steps is of no use, and
  // a training run beside may need the memory.
  void check_memory(const std::string& path) const {
    constexpr std::uint64_t kTimes = 3;  // the file, the records, and what is made of them
    constexpr std::uint64_t kWholeBytesMax = 4_GiB;
    const std::uint64_t memory_bytes = topology().memory_bytes;
    const std::uint64_t room_bytes = memory_bytes == 0 ? kWholeBytesMax : memory_bytes / 2 / kTimes;
    if (size_bytes_ <= std::min(kWholeBytesMax, room_bytes)) return;
    const std::string limit =
        kWholeBytesMax <= room_bytes
            ? fmt::format("at most {} are read whole", format_bytes(kWholeBytesMax))
            : fmt::format("to read it whole takes {} of this machine's {}",
                          format_bytes(kTimes * size_bytes_), format_bytes(memory_bytes));
    throw Error(
        ErrorCode::kOutOfMemory,
        fmt::format("the trace \"{}\" has {}; {}. Give some steps, such as --steps 100-120: "
                    "then only their records are kept",
                    path, format_bytes(size_bytes_), limit));
  }

  const std::byte* data_ = nullptr;
  std::size_t forgotten_ = 0;
  std::size_t size_bytes_ = 0;
};

// Memory that is about to be touched for the first time: by the page of 4 KiB that takes longer
// than reading the file. A hint; a kernel that refuses it is as right.
void use_huge_pages(void* data, std::size_t size_bytes) {
  constexpr std::uintptr_t kPageBytes = 2u << 20;
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t begin = (address + kPageBytes - 1) / kPageBytes * kPageBytes;
  const std::uintptr_t end = (address + size_bytes) / kPageBytes * kPageBytes;
  if (begin < end) (void)::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

// Times and lengths that no monotonic clock and no run comes near, so that sums of them stay
// numbers.
constexpr std::uint64_t kTimeMaxNs = std::uint64_t{1} << 60;    // 36 years
constexpr std::uint64_t kLengthMaxNs = std::uint64_t{1} << 53;  // 104 days
constexpr std::uint64_t kSizeBytesMax = std::uint64_t{1} << 50;
constexpr std::uint64_t kWallMaxNs = std::uint64_t{1} << 62;  // in the year 2116

bool is_plausible(const TraceRecord& record) {
  return record.begin_ns <= record.end_ns && record.end_ns <= kTimeMaxNs &&
         record.started_ns <= kTimeMaxNs && record.moved_ns <= kTimeMaxNs &&
         record.end_ns - record.begin_ns <= kLengthMaxNs && record.size_bytes <= kSizeBytesMax;
}

class Parser {
 public:
  // Calls `passed` with the bytes that it has taken, block by block.
  Parser(TraceFile& file, std::span<const std::byte> bytes, TraceSteps steps,
         std::function<void(std::size_t)> passed)
      : file_(file), bytes_(bytes), steps_(steps), passed_(std::move(passed)) {}

  void run() {
    // Most of a file is records.
    if (steps_.are_all()) file_.records.reserve(bytes_.size() / sizeof(TraceRecord));
    use_huge_pages(file_.records.data(), file_.records.capacity() * sizeof(TraceRecord));
    std::size_t at = 0;
    while (at + sizeof(TraceBlockHeader) <= bytes_.size()) {
      const std::size_t block_bytes = take_block(bytes_.subspan(at));
      if (block_bytes != 0) {
        at += block_bytes;
        passed_(at);
        continue;
      }
      // Blocks lie on multiples of 64 bytes, damaged neighbours or not.
      if (!is_skipping_) ++file_.damaged_blocks;
      is_skipping_ = true;
      at += kTraceAlignBytes;
    }
    for (const auto& [thread, lost] : lost_by_thread_) file_.lost += lost;
    add_open_spans(file_, begun_);
  }

 private:
  // How many times the file's bytes may go into checksums that do not match. Damage costs less; a
  // file made of nothing but headers that name long blocks would take the square of its length.
  static constexpr std::uint64_t kVainTimesMax = 64;

  static std::uint64_t payload_bytes_max(TraceBlockType type) {
    return type == TraceBlockType::kRecords ? kTraceBlockRecordsMax * sizeof(TraceRecord)
                                            : kTraceSectionBytesMax;
  }

  // The bytes of the block at the front; 0 when there is no whole one.
  std::size_t take_block(std::span<const std::byte> rest) {
    TraceBlockHeader header;
    std::memcpy(&header, rest.data(), sizeof(header));
    rest = rest.subspan(sizeof(header));
    if (header.magic != kTraceMagic || header.payload_bytes > rest.size() ||
        header.payload_bytes % kTraceAlignBytes != 0 ||
        header.payload_bytes > payload_bytes_max(static_cast<TraceBlockType>(header.type)))
      return 0;
    const auto payload = rest.first(header.payload_bytes);
    if (checked_in_vain_ / kVainTimesMax > bytes_.size()) return 0;
    if (trace_checksum(header, payload) != header.checksum) {
      checked_in_vain_ += payload.size();
      return 0;
    }
    is_skipping_ = false;
    const auto type = static_cast<TraceBlockType>(header.type);
    if (type == TraceBlockType::kRecords) take_records(header, payload);
    if (type == TraceBlockType::kSection) take_section(header, payload);
    return sizeof(header) + header.payload_bytes;
  }

  void take_records(const TraceBlockHeader& header, std::span<const std::byte> payload) {
    const std::size_t count =
        std::min<std::size_t>(header.count, payload.size() / sizeof(TraceRecord));
    const std::size_t first = file_.records.size();
    // Aligned, as everything in the file is; appended without being cleared first.
    const auto* const records = reinterpret_cast<const TraceRecord*>(payload.data());
    file_.records.insert(file_.records.end(), records, records + count);
    lost_by_thread_[header.thread] = header.lost;
    // Kinds and reasons of a later version are none of this one's.
    const auto is_no_span = [this](const TraceRecord& record) {
      if (record.step < steps_.first && record.kind == TraceKind::kStep)
        file_.lacks_first_steps = true;
      if (record.step < steps_.first || record.step > steps_.last) return true;
      if (static_cast<std::size_t>(record.kind) >= kTraceKinds ||
          static_cast<std::size_t>(record.reason) >= kTraceReasons)
        return true;
      if (record.end_ns == 0 && record.begin_ns != 0 && record.begin_ns <= kTimeMaxNs)
        begun_.push_back(record);
      return !is_plausible(record);
    };
    const auto begin = file_.records.begin() + static_cast<std::ptrdiff_t>(first);
    file_.records.erase(std::remove_if(begin, file_.records.end(), is_no_span),
                        file_.records.end());
  }

  void take_section(const TraceBlockHeader& header, std::span<const std::byte> payload) {
    const std::string name(header.name, strnlen(header.name, kTraceNameBytes));
    const std::size_t length = std::min<std::size_t>(header.count, payload.size());
    file_.sections[name] = std::string(reinterpret_cast<const char*>(payload.data()), length);
    if (name == "end") file_.is_complete = true;
  }

  TraceFile& file_;
  std::span<const std::byte> bytes_;
  TraceSteps steps_;
  std::function<void(std::size_t)> passed_;
  std::vector<TraceRecord> begun_;
  std::map<std::uint32_t, std::uint64_t> lost_by_thread_;
  bool is_skipping_ = false;
  std::uint64_t checked_in_vain_ = 0;
};

void read_description(TraceFile& file) {
  const auto fail = [&](const std::string& why) {
    throw Error(ErrorCode::kInput,
                fmt::format("\"{}\" is no trace of this version of sluice: {}", file.path, why));
  };
  const auto found = file.sections.find("sluice-trace");
  if (found == file.sections.end()) fail("its description is missing");
  try {
    const nlohmann::json document = parse_untrusted_json<nlohmann::json>(found->second);
    const auto version = document.at("version").get<std::uint32_t>();
    if (version != kTraceVersion)
      fail(fmt::format("its version is {}, this is {}", version, kTraceVersion));
    file.rank = document.at("rank").get<std::uint32_t>();
    file.ranks = document.at("ranks").get<std::uint32_t>();
    file.host = document.at("host").get<std::string>();
    file.boot = document.at("boot").get<std::string>();
    file.steady_ns = document.at("steady_ns").get<std::uint64_t>();
    file.wall_ns = document.at("wall_ns").get<std::uint64_t>();
    if (file.rank >= file.ranks)
      fail(
          fmt::format("its description is damaged: it is of rank {} of {}", file.rank, file.ranks));
    if (file.steady_ns > kWallMaxNs || file.wall_ns > kWallMaxNs)
      fail("its description is damaged: it was not recorded in this century");
  } catch (const nlohmann::json::exception& error) {
    fail(fmt::format("its description is damaged: {}", error.what()));
  }
}

// Damaged, it is as if it were not there: the other clocks serve.
void read_clock(TraceFile& file) {
  const auto found = file.sections.find("clock");
  if (found == file.sections.end()) return;
  const auto document = parse_untrusted_json<nlohmann::json>(found->second);
  if (!document.is_object()) return;
  const auto offset = document.find("offset_ns"), error = document.find("error_ns");
  if (offset == document.end() || !offset->is_number_integer() || error == document.end() ||
      !error->is_number_unsigned())
    return;
  const auto offset_ns = offset->get<std::int64_t>();
  if (std::abs(static_cast<double>(offset_ns)) > static_cast<double>(kTimeMaxNs)) return;
  file.clock_offset_ns = offset_ns;
  file.clock_error_ns = error->get<std::uint64_t>();
}

// The time to add to those of `file` so that they are on the clock of `first`.
std::int64_t shift_between(const TraceFile& file, const TraceFile& first) {
  if (file.clock_offset_ns && first.clock_offset_ns)
    return *first.clock_offset_ns - *file.clock_offset_ns;
  if (file.boot == first.boot) return 0;
  const auto offset_of = [](const TraceFile& of) {
    return static_cast<std::int64_t>(of.wall_ns - of.steady_ns);
  };
  return offset_of(file) - offset_of(first);
}

// So that its records are on the clock of `first`.
void align_clock(TraceFile& file, const TraceFile& first) {
  const auto shift_ns = static_cast<std::uint64_t>(shift_between(file, first));
  if (shift_ns == 0) return;
  for (TraceRecord& record : file.records) {
    for (std::uint64_t* time_ns :
         {&record.begin_ns, &record.end_ns, &record.started_ns, &record.moved_ns}) {
      if (*time_ns != 0) *time_ns += shift_ns;
    }
  }
  // By a damaged clock, some have left the range of times.
  std::erase_if(file.records, [](const TraceRecord& record) { return !is_plausible(record); });
}

struct Times {
  std::uint64_t begin_ns = UINT64_MAX;
  std::uint64_t end_ns = 0;
};

Times times_of(const TraceFile& file) {
  Times times;
  for (const TraceRecord& record : file.records) {
    times.begin_ns = std::min(times.begin_ns, record.begin_ns);
    times.end_ns = std::max(times.end_ns, record.end_ns);
  }
  return times;
}

// Ranks of a run record at the same time. Wall clocks of two machines may be too far apart to tell.
bool are_apart(const TraceFile& a, const TraceFile& b) {
  const bool is_one_clock = a.boot == b.boot || (a.clock_offset_ns && b.clock_offset_ns);
  if (!is_one_clock || a.records.empty() || b.records.empty()) return false;
  const Times of_a = times_of(a), of_b = times_of(b);
  return of_a.end_ns < of_b.begin_ns || of_b.end_ns < of_a.begin_ns;
}

// `file` is on the clock of `other`.
void require_one_run(const TraceFile& file, const TraceFile& other) {
  const auto fail = [&](const std::string& why) {
    throw Error(ErrorCode::kInput,
                fmt::format("\"{}\" and \"{}\" are not of one run: {}; give the files of one run",
                            other.path, file.path, why));
  };
  if (file.rank == other.rank)
    throw Error(ErrorCode::kInput,
                fmt::format("\"{}\" and \"{}\" are both of rank {}; give one file of each rank",
                            other.path, file.path, file.rank));
  if (file.ranks != other.ranks)
    fail(fmt::format("one is of {} ranks, the other of {}", other.ranks, file.ranks));
  if (are_apart(file, other)) fail("one ended before the other began");
}

}  // namespace

TraceFile parse_trace(const std::string& path, std::span<const std::byte> bytes, TraceSteps steps,
                      const std::function<void(std::size_t)>& passed) {
  TraceFile file;
  file.path = path;
  file.file_bytes = bytes.size();
  Parser(file, bytes, steps, passed).run();
  read_description(file);
  read_clock(file);
  return file;
}

TraceFile read_trace(const std::string& path, TraceSteps steps) {
  MappedFile mapped(path, steps);
  TraceFile file = parse_trace(path, mapped.bytes(), steps, [&](std::size_t end) {
    if (!steps.are_all()) mapped.forget_before(end);
  });
  if (!steps.are_all() && file.records.empty())
    throw Error(ErrorCode::kInput, fmt::format("the trace \"{}\" has no record of steps {} to {}",
                                               path, steps.first, steps.last));
  return file;
}

std::vector<TraceFile> read_traces(const std::vector<std::string>& paths, TraceSteps steps) {
  std::vector<TraceFile> files;
  for (const std::string& path : paths) {
    files.push_back(read_trace(path, steps));
    align_clock(files.back(), files.front());
    for (std::size_t i = 0; i + 1 < files.size(); ++i) require_one_run(files.back(), files[i]);
  }
  std::ranges::sort(files, {}, &TraceFile::rank);
  return files;
}

}  // namespace sluice
