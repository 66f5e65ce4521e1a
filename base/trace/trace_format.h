// The layout of a trace file (docs/tracing.md). The file is a sequence of blocks. A block has a
// header of 64 bytes and a payload. The payload is padded to a multiple of 64 bytes, so that
// records are aligned in a mapped file. A block holds either records of one thread, or a text with
// a name. The first block is a text named "sluice-trace", which describes the records. All numbers
// in the file are little-endian.
//
// Thread rule: the functions are pure. Invariant: a block whose checksum matches is whole. After a
// damaged block, a reader searches for the next magic number and continues there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/trace/trace_recorder.h"

namespace sluice {

inline constexpr std::uint64_t kTraceMagic = 0x0a31'4543'4152'5453;  // "STRACE1\n"
inline constexpr std::uint32_t kTraceVersion = 1;
inline constexpr std::size_t kTraceAlignBytes = 64;
inline constexpr std::size_t kTraceNameBytes = 16;
inline constexpr std::uint32_t kTraceBlockRecordsMax = 4096;
inline constexpr std::uint32_t kTraceSectionBytesMax = 256u << 20;

// Trace files hold these numbers, so the numbers must never change.
enum class TraceBlockType : std::uint32_t { kRecords = 1, kSection = 2 };

struct TraceBlockHeader {
  std::uint64_t magic = kTraceMagic;
  std::uint32_t type = 0;    // TraceBlockType
  std::uint32_t count = 0;   // records, or bytes of text
  std::uint64_t lost = 0;    // records: the number that this thread's ring has dropped so far
  std::uint32_t thread = 0;  // records: the thread's number in this file
  std::uint32_t reserved = 0;
  char name[kTraceNameBytes] = {};  // of the thread or the text; zero-padded
  std::uint64_t payload_bytes = 0;  // with padding
  std::uint64_t checksum = 0;       // XXH3 of header and payload; this field counts as 0
};
static_assert(sizeof(TraceBlockHeader) == kTraceAlignBytes);

std::uint64_t trace_checksum(const TraceBlockHeader& header, std::span<const std::byte> payload);

// Returns the text of the section "sluice-trace", as JSON. The text contains the version, the
// layout of a record, the names of kinds and reasons, and this process's clocks, host and rank.
std::string trace_description(const TraceOptions& options);

}  // namespace sluice
