// A file that torch.save() has written. The file contains one tensor or one number. The file is a
// zip archive of a pickle and of raw elements. Only requested ranges are read. Before the first
// read, the checksum of the elements is compared with the archive's checksum.
//
// Thread rule: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "engine/checkpoint/pickle_reader.h"

namespace sluice {

class TorchFile {
 public:
  // If the file holds a dictionary, `key` names the entry to read.
  // Fails with kInput if the file cannot be used. The message names the file, and says what the
  // file contains.
  TorchFile(const std::string& path, const std::string& key);

  const std::string& path() const { return path_; }
  bool has_tensor() const;
  // The tensor's shape. Requires: has_tensor().
  const std::vector<std::uint64_t>& shape() const;
  std::uint64_t element_count() const;
  // Returns the number in the file, or the only element of the tensor.
  // Fails with kInput if the file does not hold a single number, or if the number is negative or
  // not whole.
  std::uint64_t count();
  // The call copies elements [first_element, ...) as fp32.
  // Fails with:
  // - kInput: the elements are not of a 16-bit or 32-bit float type, or the range goes beyond the
  //   tensor's last element.
  // - kDamaged: the elements do not match their checksum.
  // - kIo: the drive reports an error.
  void read(std::uint64_t first_element, std::span<float> values);

 private:
  // An entry of the archive, stored without compression.
  struct Entry {
    std::uint64_t header_bytes = 0;  // the place of the entry's header
    std::uint64_t size_bytes = 0;
    std::uint32_t crc32 = 0;
  };

  void read_at(std::uint64_t offset_bytes, std::span<std::byte> bytes) const;
  void read_directory();
  void add_entry(std::string_view header, std::string_view extra, const std::string& name);
  std::uint64_t data_begin(const Entry& entry) const;
  const Entry& entry_ending_with(const std::string& name) const;
  void find_elements();
  void check_elements();
  void read_elements(std::uint64_t first_byte, std::span<std::byte> bytes);
  [[noreturn]] void fail(const std::string& why) const;

  std::string path_;
  UniqueFd file_;
  std::uint64_t file_bytes_ = 0;
  std::map<std::string, Entry> entries_;
  PickleObject object_;

  const PickleTensor* tensor_ = nullptr;
  Entry elements_;
  std::uint64_t begin_bytes_ = 0;  // of the tensor's first element, in the file
  std::uint64_t element_bytes_ = 0;
  bool is_checked_ = false;
};

}  // namespace sluice
