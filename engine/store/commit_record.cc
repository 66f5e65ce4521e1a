#include "engine/store/commit_record.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <tuple>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/error.h>
#include <sluice/units.h>

namespace sluice {
namespace {

constexpr const char* kReserved = "a field that ought to be zero is not";
constexpr std::uint64_t kFileBytesMax = std::uint64_t{1} << 62;

std::uint64_t page_bytes_for(std::uint64_t size_bytes) {
  return align_up(size_bytes, kCommitAlignBytes);
}

std::uint64_t length_of(std::uint64_t planes, std::uint64_t settings, std::uint64_t application) {
  return sizeof(CommitHeader) + planes * sizeof(CommitPlane) + settings + application;
}

CommitHeader header_of(const CommitRecord& record) {
  CommitHeader header{.kind = static_cast<std::uint32_t>(record.kind),
                      .length_bytes = commit_bytes(record),
                      .rank = record.rank,
                      .rank_count = record.rank_count,
                      .generation = record.generation,
                      .step = record.step,
                      .model_hash = record.model_hash,
                      .layout_hash = record.layout_hash,
                      .config_hash = record.config_hash,
                      .file_count = record.file_count,
                      .plane_count = static_cast<std::uint32_t>(record.planes.size()),
                      .settings_bytes = static_cast<std::uint32_t>(record.settings.size()),
                      .application_bytes = static_cast<std::uint32_t>(record.application.size()),
                      .loss_scale_bits = std::bit_cast<std::uint64_t>(record.scale.scale),
                      .good_steps = record.scale.good_steps,
                      .hysteresis_left = record.scale.hysteresis_left};
  std::ranges::copy(record.store_id, header.store_id);
  return header;
}

CommitReading damaged(std::string problem) {
  return {.state = CommitState::kDamaged, .problem = std::move(problem)};
}

std::string mismatch(const char* field, std::uint64_t expected, std::uint64_t found) {
  return fmt::format("its {} is {:#x} where {:#x} is expected", field, found, expected);
}

// Returns the defect in the header of a record whose checksum fits: no writer of this version makes
// such a header.
std::optional<std::string> problem_of(const CommitHeader& header) {
  const std::uint64_t length =
      length_of(header.plane_count, header.settings_bytes, header.application_bytes);
  if (length != header.length_bytes) return mismatch("length", length, header.length_bytes);
  if (header.settings_bytes > kSettingsBytesMax)
    return fmt::format("its settings take {} B of at most {}", header.settings_bytes,
                       kSettingsBytesMax);
  if (header.application_bytes > kApplicationBytesMax)
    return fmt::format("its application's blob takes {} B of at most {}", header.application_bytes,
                       kApplicationBytesMax);
  return std::nullopt;
}

// The same for the record.
std::optional<std::string> problem_of(const CommitRecord& record) {
  if (record.kind != CommitKind::kState && record.kind != CommitKind::kVoid)
    return fmt::format("its kind is {}", static_cast<std::uint32_t>(record.kind));
  if (record.rank >= record.rank_count)
    return fmt::format("it is of rank {} of {}", record.rank, record.rank_count);
  std::vector<std::tuple<std::uint32_t, std::uint64_t, std::uint64_t>> extents;
  for (std::size_t i = 0; i < record.planes.size(); ++i) {
    const CommitPlane& plane = record.planes[i];
    if (plane.copy_count == 0 || plane.copy_count > kCopiesMax ||
        plane.named_copy >= plane.copy_count)
      return fmt::format("plane {} names copy {} of {}", i, plane.named_copy, plane.copy_count);
    for (const CommitExtent& copy : std::span(plane.copies).subspan(plane.copy_count))
      if (copy.file != 0 || copy.reserved != 0 || copy.offset_bytes != 0) return kReserved;
    for (const CommitExtent& copy : std::span(plane.copies).first(plane.copy_count)) {
      if (copy.file >= record.file_count || copy.offset_bytes % kCommitAlignBytes != 0 ||
          copy.offset_bytes > kFileBytesMax || plane.length_bytes > kFileBytesMax)
        return fmt::format("plane {} lies at {} in file {} of {}, {} B long", i, copy.offset_bytes,
                           copy.file, record.file_count, plane.length_bytes);
      if (copy.reserved != 0) return kReserved;
      extents.emplace_back(copy.file, copy.offset_bytes, copy.offset_bytes + plane.length_bytes);
    }
  }
  std::ranges::sort(extents);
  for (std::size_t i = 1; i < extents.size(); ++i) {
    const auto& [file, begin, end] = extents[i];
    if (file == std::get<0>(extents[i - 1]) && begin < std::get<2>(extents[i - 1]))
      return fmt::format("two copies overlap at {} in file {}", begin, file);
  }
  return std::nullopt;
}

CommitRecord record_of(const CommitHeader& header, std::span<const std::byte> rest) {
  CommitRecord record{.kind = static_cast<CommitKind>(header.kind),
                      .rank = header.rank,
                      .rank_count = header.rank_count,
                      .generation = header.generation,
                      .step = header.step,
                      .model_hash = header.model_hash,
                      .layout_hash = header.layout_hash,
                      .config_hash = header.config_hash,
                      .scale = {.scale = std::bit_cast<double>(header.loss_scale_bits),
                                .good_steps = header.good_steps,
                                .hysteresis_left = header.hysteresis_left},
                      .file_count = header.file_count};
  std::ranges::copy(header.store_id, record.store_id.begin());
  const std::span table = rest.first(header.plane_count * sizeof(CommitPlane));
  record.planes.resize(header.plane_count);
  if (!table.empty()) std::memcpy(record.planes.data(), table.data(), table.size());
  const std::span settings = rest.subspan(table.size(), header.settings_bytes);
  record.settings.assign(reinterpret_cast<const char*>(settings.data()), settings.size());
  const std::span blob = rest.subspan(table.size() + settings.size());
  record.application.assign(blob.begin(), blob.end());
  return record;
}

// Checks that reserved fields are zero.
bool is_encoding_of(const CommitRecord& record, std::span<const std::byte> bytes) {
  std::vector<std::byte> again(page_bytes_for(bytes.size()));
  encode_commit(record, again);
  return std::ranges::equal(std::span(again).first(bytes.size()), bytes);
}

}  // namespace

std::string text_of(const StoreId& id) {
  return fmt::format("{:02x}", fmt::join(id, ""));
}

std::uint64_t commit_bytes(const CommitRecord& record) {
  return length_of(record.planes.size(), record.settings.size(), record.application.size());
}

std::uint64_t commit_slot_bytes(std::uint64_t plane_count) {
  return page_bytes_for(length_of(plane_count, kSettingsBytesMax, kApplicationBytesMax));
}

std::uint64_t encode_commit(const CommitRecord& record, std::span<std::byte> target) {
  const std::uint64_t length = commit_bytes(record);
  const std::uint64_t padded = page_bytes_for(length);
  SLUICE_CHECK(padded <= target.size(), "a record fits into its slot");
  SLUICE_CHECK(record.settings.size() <= kSettingsBytesMax &&
                   record.application.size() <= kApplicationBytesMax,
               "settings and blob are within their limits");
  CommitHeader header = header_of(record);
  std::byte* next = target.data() + sizeof(header);
  const auto append = [&next](const auto& part) {
    const std::span bytes = std::as_bytes(std::span(part));
    if (!bytes.empty()) std::memcpy(next, bytes.data(), bytes.size());
    next += bytes.size();
  };
  append(record.planes);
  append(record.settings);
  append(record.application);
  std::memset(next, 0, padded - length);
  header.checksum = commit_checksum(header, target.first(length).subspan(sizeof(header)));
  std::memcpy(target.data(), &header, sizeof(header));
  return padded;
}

CommitReading decode_commit(std::span<const std::byte> slot) {
  CommitHeader header;
  if (slot.size() < sizeof(header))
    return damaged(fmt::format("its slot has {} B, less than a header", slot.size()));
  const std::span start = slot.first(sizeof(header));
  if (std::ranges::all_of(start, [](std::byte byte) { return byte == std::byte{0}; })) return {};
  std::memcpy(&header, start.data(), sizeof(header));
  if (header.magic != kCommitMagic) return damaged(mismatch("magic", kCommitMagic, header.magic));
  if (header.length_bytes < sizeof(CommitHeader) || header.length_bytes > slot.size())
    return damaged(
        fmt::format("its length is {} B, which is not between {} and the {} B of its slot",
                    header.length_bytes, sizeof(CommitHeader), slot.size()));
  const std::span whole = slot.first(header.length_bytes);
  const std::span rest = whole.subspan(sizeof(header));
  const std::uint64_t sum = commit_checksum(header, rest);
  if (sum != header.checksum) return damaged(mismatch("checksum", header.checksum, sum));
  if (header.version != kCommitVersion)
    return {.state = CommitState::kForeign,
            .problem = fmt::format("it has version {} of the format, and this program knows {}",
                                   header.version, kCommitVersion)};
  if (const auto problem = problem_of(header)) return damaged(*problem);
  CommitReading reading{
      .state = CommitState::kWhole, .record = record_of(header, rest), .checksum = header.checksum};
  if (const auto problem = problem_of(reading.record)) return damaged(*problem);
  if (!is_encoding_of(reading.record, whole)) return damaged(kReserved);
  return reading;
}

}  // namespace sluice
