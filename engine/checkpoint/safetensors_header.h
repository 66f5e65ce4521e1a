// The JSON header of a safetensors file. The header lists the tensors and their places. The parser
// reads the header in one pass, and fails at the first text that is outside the format. So the
// length of a header limits the time and the memory that the parser needs, even if the header is
// damaged or hostile.
//
// Thread rule: the functions are pure.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

struct HeaderTensor {
  std::string dtype;
  std::vector<std::uint64_t> shape;
  std::uint64_t begin_bytes = 0;  // after the header
  std::uint64_t end_bytes = 0;
};

struct SafetensorsHeader {
  std::map<std::string, HeaderTensor> tensors;
  std::map<std::string, std::string> metadata;
};

// Returns the size of an element in bytes, such as 4 for "F32" and 2 for "BF16". The result is 0
// for an unknown type.
std::uint64_t safetensors_element_bytes(std::string_view dtype);

// A tensor to be written.
struct SafetensorsEntry {
  std::string name;
  std::string dtype;  // "F32", "BF16", "F16" or "I16"
  std::vector<std::uint64_t> shape;

  std::uint64_t size_bytes() const;
};

// Returns the beginning of a file: the length of the header, and the header. The header is padded
// so that the data begins at a multiple of `align_bytes`. `align_bytes` is a multiple of 8. The
// data of the tensors comes after the header in the order of `entries`, without gaps.
std::string safetensors_beginning(std::span<const SafetensorsEntry> entries,
                                  const std::map<std::string, std::string>& metadata,
                                  std::uint64_t align_bytes = 8);

// Fails with kInput if the text does not have the format, if a name occurs twice, or if two tensors
// share bytes. The message names the defect.
SafetensorsHeader parse_safetensors_header(std::string_view text);

}  // namespace sluice
