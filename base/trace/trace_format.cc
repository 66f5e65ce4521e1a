#include "base/trace/trace_format.h"

#include <unistd.h>

#include <cstddef>
#include <ctime>
#include <fstream>

#include <fmt/format.h>
#include <xxhash.h>

#include <sluice/error.h>

namespace sluice {
namespace {

std::string first_line_of(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Characters that the kernel allows in a host's name need no escape; any others are left out.
std::string host_name() {
  char name[256] = {};
  (void)::gethostname(name, sizeof(name) - 1);
  std::string clean;
  for (const char* c = name; *c != '\0'; ++c) {
    if (*c > ' ' && *c != '"' && *c != '\\' && static_cast<unsigned char>(*c) < 127) clean += *c;
  }
  return clean;
}

std::uint64_t wall_clock_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 +
         static_cast<std::uint64_t>(now.tv_nsec);
}

struct Field {
  const char* name;
  std::size_t offset;
  std::size_t bytes;
};
#define SLUICE_FIELD(member)                                            \
  Field {                                                               \
#member, offsetof(TraceRecord, member), sizeof(TraceRecord::member) \
  }
constexpr Field kFields[] = {
    SLUICE_FIELD(begin_ns), SLUICE_FIELD(end_ns),     SLUICE_FIELD(started_ns),
    SLUICE_FIELD(moved_ns), SLUICE_FIELD(size_bytes), SLUICE_FIELD(step),
    SLUICE_FIELD(unit),     SLUICE_FIELD(block),      SLUICE_FIELD(use),
    SLUICE_FIELD(kind),     SLUICE_FIELD(reason),     SLUICE_FIELD(lane),
    SLUICE_FIELD(detail)};
#undef SLUICE_FIELD

template <class Enum>
std::string names(std::size_t count) {
  std::string list;
  for (std::size_t i = 0; i < count; ++i)
    list += fmt::format("{}\"{}\"", i == 0 ? "" : ", ", name_of(static_cast<Enum>(i)));
  return list;
}

}  // namespace

std::uint64_t trace_checksum(const TraceBlockHeader& header, std::span<const std::byte> payload) {
  TraceBlockHeader blank = header;
  blank.checksum = 0;
  const XXH64_hash_t seed = XXH3_64bits(&blank, sizeof(blank));
  return XXH3_64bits_withSeed(payload.data(), payload.size(), seed);
}

std::string trace_description(const TraceOptions& options) {
  std::string fields;
  for (const Field& field : kFields)
    fields += fmt::format("{}{{\"name\": \"{}\", \"offset\": {}, \"bytes\": {}}}",
                          fields.empty() ? "" : ", ", field.name, field.offset, field.bytes);
  return fmt::format(
      R"({{"version": {}, "record_bytes": {}, "fields": [{}], "kinds": [{}], "reasons": [{}], )"
      R"("clock": "{}", "steady_ns": {}, "wall_ns": {}, "boot": "{}", "host": "{}", "pid": {}, )"
      R"("rank": {}, "ranks": {}}})",
      kTraceVersion, sizeof(TraceRecord), fields, names<TraceKind>(kTraceKinds),
      names<TraceReason>(kTraceReasons), trace_clock_name(), steady_now_ns(), wall_clock_ns(),
      first_line_of("/proc/sys/kernel/random/boot_id"), host_name(), ::getpid(), options.rank,
      options.ranks);
}

}  // namespace sluice
