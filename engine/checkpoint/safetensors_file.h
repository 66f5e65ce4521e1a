// The class reads files of named tensors in the safetensors format. A file consists of the length
// of the header in 8 bytes, a JSON header, and raw little-endian data. The constructor checks the
// header against the file's size. Later calls read the requested data. The file is not mapped into
// memory. A mapped file would count as memory of the process. If a mapped file were truncated,
// SIGBUS would end the process.
//
// Thread rule: the object is constant after construction, so any number of threads may use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/unique_fd.h"
#include "engine/checkpoint/safetensors_header.h"
#include "io/checksum.h"

namespace sluice {

class SafetensorsFile {
 public:
  struct Entry {
    std::string dtype;  // the type's name in the format: "F32", "BF16"
    std::vector<std::uint64_t> shape;
    std::uint64_t offset_bytes = 0;  // in the file
    std::uint64_t size_bytes = 0;
  };

  // Fails with kInput if the file is missing, truncated, or not a safetensors file.
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return path_; }
  std::uint64_t file_bytes() const { return file_bytes_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  // The checksum of everything before the data.
  const Checksum128& beginning_sum() const { return beginning_sum_; }
  const std::map<std::string, Entry>& entries() const { return entries_; }
  // Finds a tensor of any type. The result is null if no tensor has the name `name`.
  const Entry* find(const std::string& name) const;
  // The call fills `bytes` with bytes of a tensor, beginning with byte `first_byte`.
  // Fails with kInput if the file has been truncated since construction, and with kIo if the drive
  // reports an error.
  // Requires: `entry` belongs to this file, and the range is inside the tensor.
  void read_bytes(const Entry& entry, std::uint64_t first_byte, std::span<std::byte> bytes) const;

  // The call fills `bytes` with bytes of the file, beginning with byte `offset_bytes`.
  void read_at(std::uint64_t offset_bytes, std::span<std::byte> bytes) const;
  // Does the same as read_at(), but does not use the page cache if the file system allows such
  // reads. These reads run at the rate of the drive, and do not displace other files from the page
  // cache. Returns the bytes, which lie in `buffer`. If `buffer` is too small, the call replaces
  // `buffer`.
  std::span<const std::byte> read_direct(std::uint64_t offset_bytes, std::uint64_t size_bytes,
                                         AlignedBuffer& buffer) const;

  // The functions below are for fp32 tensors.
  // Returns whether `name` is an F32 tensor.
  bool has(const std::string& name) const;
  // Fails with kInput if no F32 tensor has the name `name`.
  const std::vector<std::uint64_t>& shape(const std::string& name) const;
  // The call fills `values` with elements of the tensor, beginning with element `first_element`.
  // Fails with kInput if the name is unknown or if the file has been truncated since construction.
  // Also fails with kIo if the drive reports an error.
  // Requires: the range is inside the tensor.
  void read(const std::string& name, std::uint64_t first_element, std::span<float> values) const;

 private:
  void open_file();
  void parse_header();
  // The data begins at byte `data_begin` of the file.
  void add_entry(const std::string& name, const HeaderTensor& tensor, std::uint64_t data_begin);
  [[noreturn]] void fail(const std::string& why) const;
  const Entry& fp32_entry(const std::string& name) const;

  // Constant after construction.
  std::string path_;
  UniqueFd file_;
  UniqueFd direct_;  // none: the file system has no O_DIRECT
  std::uint64_t file_bytes_ = 0;
  Checksum128 beginning_sum_;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace sluice
