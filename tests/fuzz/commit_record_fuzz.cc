// A libFuzzer target: the reader of commit records, and the choice among them. Bytes that are given
// get a true checksum, so that the fuzzer gets past it.
#include <cstdlib>
#include <cstring>
#include <vector>

#include <sluice/error.h>
#include "engine/store/commit_choice.h"

namespace sluice {
namespace {

CommitReading read(std::vector<std::byte> bytes) {
  CommitHeader header;
  if (bytes.size() < sizeof(header)) return decode_commit(bytes);
  std::memcpy(&header, bytes.data(), sizeof(header));
  header.magic = kCommitMagic;
  if (header.length_bytes >= sizeof(header) && header.length_bytes <= bytes.size())
    header.checksum = commit_checksum(
        header, std::span(bytes).first(header.length_bytes).subspan(sizeof(header)));
  std::memcpy(bytes.data(), &header, sizeof(header));
  CommitReading reading = decode_commit(bytes);
  if (reading.state != CommitState::kWhole) return reading;
  // An accepted record is one that a writer writes.
  std::vector<std::byte> again(commit_bytes(reading.record) + kCommitAlignBytes);
  encode_commit(reading.record, again);
  if (std::memcmp(again.data(), bytes.data(), commit_bytes(reading.record)) != 0) std::abort();
  return reading;
}

}  // namespace
}  // namespace sluice

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace sluice;
  const std::span bytes = std::as_bytes(std::span(data, size));
  FoundCommits found;
  for (std::size_t i = 0; i < 4; ++i) {
    const std::span part = bytes.subspan(i * (size / 4), size / 4);
    found.readings[i / 2][i % 2] = read({part.begin(), part.end()});
  }
  (void)read({bytes.begin(), bytes.end()});
  try {
    (void)choose_commit(found);
  } catch (const Error&) {
    // That is how it refuses.
  }
  return 0;
}
