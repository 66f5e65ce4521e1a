// The JSON header of a safetensors file: what tensors it has, and where. Read in one pass that
// refuses what the format has no place for as soon as it comes, so that a damaged or hostile header
// costs neither time nor memory beyond its own length.
//
// Thread rule: pure.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

struct HeaderTensor {
  std::string dtype;
  std::vector<std::uint64_t> shape;
  std::uint64_t begin_bytes = 0;  // behind the header
  std::uint64_t end_bytes = 0;
};

struct SafetensorsHeader {
  std::map<std::string, HeaderTensor> tensors;
  std::map<std::string, std::string> metadata;
};

// Fails with: kInput, with what is wrong, when it is not JSON of the format's form, a name comes
// twice, or two tensors share bytes.
SafetensorsHeader parse_safetensors_header(std::string_view text);

}  // namespace sluice
