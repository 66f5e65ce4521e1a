// Files of named fp32 tensors in the safetensors format: 8 bytes of header length, a JSON header,
// raw little-endian data.
// Reading checks the header against the file's size first, and then fetches what is asked for: a
// mapped file would count as the process's memory, and one cut meanwhile would end it with SIGBUS.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "tools/cli/output_file.h"
#include "tools/report/safetensors_header.h"

namespace sluice {

struct SavedTensor {
  std::string name;
  std::vector<std::uint64_t> shape;

  std::uint64_t element_count() const;
};

// Fills `values` with elements [first_element, first_element + values.size()) of tensor `index`.
using TensorSource =
    std::function<void(std::size_t index, std::uint64_t first_element, std::span<float> values)>;

// Writes `tensors` in order, asking `source` piece by piece, and commits the file. `metadata` goes
// into the header. Fails with: as OutputFile; the target is then as it was before.
void write_safetensors(OutputFile& file, std::span<const SavedTensor> tensors,
                       const std::map<std::string, std::string>& metadata,
                       const TensorSource& source);

// Asks `source` for the same pieces in the same order, and writes nothing.
void read_as_if_written(std::span<const SavedTensor> tensors, const TensorSource& source);

class SafetensorsFile {
 public:
  // Fails with: kInput when the file is missing, cut, or no safetensors file with F32 tensors.
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return path_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  bool has(const std::string& name) const { return entries_.contains(name); }
  // Of any type.
  bool knows(const std::string& name) const { return has(name) || other_types_.contains(name); }
  // Fails with: kInput when there is none of that name.
  const std::vector<std::uint64_t>& shape(const std::string& name) const;
  // Copies elements [first_element, ...) to `values`.
  // Fails with: kInput for an unknown name, or when the file has been cut since; kIo.
  // Requires: the range is inside the tensor.
  void read(const std::string& name, std::uint64_t first_element, std::span<float> values) const;

 private:
  struct Entry {
    std::vector<std::uint64_t> shape;
    std::uint64_t offset_bytes = 0;  // in the file
    std::uint64_t size_bytes = 0;
  };

  void open_file();
  void parse_header();
  // The data begins at byte `data_begin` of the file.
  void add_entry(const std::string& name, const HeaderTensor& tensor, std::uint64_t data_begin);
  void read_bytes(std::uint64_t offset_bytes, std::span<std::byte> bytes) const;
  [[noreturn]] void fail(const std::string& why) const;
  const Entry& entry(const std::string& name) const;
  std::string why_not(const std::string& name) const;

  // Constant after construction.
  std::string path_;
  UniqueFd file_;
  std::uint64_t file_bytes_ = 0;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
  std::map<std::string, std::string> other_types_;  // tensors that are not F32
};

}  // namespace sluice
