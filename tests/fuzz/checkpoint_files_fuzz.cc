// A libFuzzer target: the readers of a checkpoint's files. The first byte chooses a manifest, a
// header of safetensors, or a pickle of torch.save(). Manifests get a true checksum, so that the
// fuzzer gets past it, and an accepted manifest must survive being written again.
#include <cstdlib>
#include <string>

#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include "engine/checkpoint/checkpoint_manifest.h"
#include "engine/checkpoint/pickle_reader.h"
#include "engine/checkpoint/safetensors_header.h"

namespace sluice {
namespace {

void read_manifest(std::string_view text) {
  nlohmann::json document = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!document.is_object()) return (void)parse_manifest(text, "manifest");
  document.erase("checksum");
  std::string signed_text;
  try {
    const std::string content = document.dump();
    document["checksum"] = hex_of(checksum128(std::as_bytes(std::span(content))));
    signed_text = document.dump();
  } catch (const nlohmann::json::exception&) {
    return;  // text that is not UTF-8 cannot be written again
  }
  const CheckpointManifest manifest = parse_manifest(signed_text, "manifest");
  const CheckpointManifest again = parse_manifest(manifest_text(manifest), "again");
  if (again.stored.size() != manifest.stored.size() || again.files.size() != manifest.files.size())
    std::abort();
}

}  // namespace
}  // namespace sluice

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  try {
    switch (data[0] % 3) {
      case 0: sluice::read_manifest(text); break;
      case 1: (void)sluice::parse_safetensors_header(text); break;
      default: (void)sluice::read_pickle(text, "pickle");
    }
  } catch (const sluice::Error&) {
    // That is how it refuses. Any other exception is a fault.
  }
  return 0;
}
