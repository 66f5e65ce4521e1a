// A libFuzzer target: the reader of trace files, and what is made of what it reads. Bytes that are
// given become blocks with true checksums, so that the fuzzer gets past them.
#include <cstring>
#include <vector>

#include <sluice/error.h>
#include "base/trace/trace_format.h"
#include "tools/trace/trace_summary.h"

namespace sluice {
namespace {

void add_block(std::vector<std::byte>& file, TraceBlockType type, const char* name,
               std::span<const std::byte> payload, std::uint32_t count) {
  TraceBlockHeader header;
  header.type = static_cast<std::uint32_t>(type);
  header.count = count;
  std::strncpy(header.name, name, kTraceNameBytes);
  std::vector<std::byte> padded(payload.begin(), payload.end());
  padded.resize((payload.size() + 63) / 64 * 64);
  header.payload_bytes = padded.size();
  header.checksum = trace_checksum(header, padded);
  const auto raw = std::as_bytes(std::span(&header, 1));
  file.insert(file.end(), raw.begin(), raw.end());
  file.insert(file.end(), padded.begin(), padded.end());
}

void use(std::span<const std::byte> bytes) {
  try {
    const TraceFile file = parse_trace("fuzz", bytes);
    std::vector<TraceAnalysis> ranks;
    ranks.emplace_back(file);
    (void)summary_of(ranks, {});
  } catch (const Error&) {
    // That is how the reader refuses.
  }
}

}  // namespace
}  // namespace sluice

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace sluice;
  const auto bytes = std::as_bytes(std::span(data, size));
  use(bytes);
  // The same as a section and as records behind a good description.
  const std::string description = trace_description({});
  std::vector<std::byte> file;
  add_block(file, TraceBlockType::kSection, "sluice-trace", std::as_bytes(std::span(description)),
            static_cast<std::uint32_t>(description.size()));
  const std::size_t half = size / 2;
  add_block(file, TraceBlockType::kSection, "engine", bytes.first(half),
            static_cast<std::uint32_t>(half));
  add_block(file, TraceBlockType::kRecords, "thread", bytes.subspan(half),
            static_cast<std::uint32_t>((size - half) / sizeof(TraceRecord)));
  use(file);
  return 0;
}
