// Reads and writes tensors by name in the safetensors format. A reader reads a single file, or a
// folder in the form that Hugging Face writes. In such a folder, an index names the file of each
// tensor. Files are not mapped into memory, and only the requested ranges are read.
//
// Thread rule: a reader is constant after construction, and any number of threads may read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <sluice/export.h>

namespace sluice {

struct SLUICE_EXPORT SafetensorsTensor {
  std::string name;
  std::string dtype;  // the type's name in the format: "F32", "BF16", "F16", "I64"
  std::vector<std::uint64_t> shape;

  std::uint64_t element_count() const;
};

class SLUICE_EXPORT SafetensorsReader {
 public:
  // `path` is a file or a folder. A folder contains either model.safetensors.index.json and the
  // files that this index names, or only model.safetensors. Every header is checked against its
  // file's length.
  // Fails with kInput, naming the file:
  // - A file is missing, cut or of another format.
  // - An index names files outside of the folder.
  // - A tensor is not where the index says.
  explicit SafetensorsReader(const std::string& path);
  ~SafetensorsReader();
  SafetensorsReader(SafetensorsReader&& other) noexcept;
  SafetensorsReader& operator=(SafetensorsReader&& other) noexcept;

  const std::string& path() const;
  bool is_folder() const;
  // The "__metadata__" of the file. If there are several files, the metadata is that of the first
  // file.
  const std::map<std::string, std::string>& metadata() const;
  // The names of all tensors, sorted.
  std::vector<std::string> names() const;
  // The result is null if no tensor has that name.
  const SafetensorsTensor* find(const std::string& name) const;

  // Copies elements of a tensor to `values`, beginning with element `first_element`. The copies are
  // fp32 numbers. Every fp32, bf16 or fp16 value is converted exactly.
  // Fails with:
  // - kInput: the name is unknown, the elements are neither fp32, bf16 nor fp16, or the tensor is
  //   shorter than the range.
  // - kInput: the file has become shorter since the reader was made.
  // - kIo: the drive reports an error.
  void read(const std::string& name, std::uint64_t first_element, std::span<float> values) const;
  // Copies bytes of a tensor to `bytes`, beginning with byte `first_byte`. The tensor may have any
  // type. The bytes are copied from the file without a conversion.
  // Fails with the errors of read().
  void read_bytes(const std::string& name, std::uint64_t first_byte,
                  std::span<std::byte> bytes) const;

 private:
  struct Content;
  std::unique_ptr<Content> content_;
};

// The function copies bytes of tensor number `index` to `bytes`, beginning with byte `first_byte`.
// The elements are little-endian and in row-major order.
using SafetensorsBytes =
    std::function<void(std::size_t index, std::uint64_t first_byte, std::span<std::byte> bytes)>;

// Reserves space for the whole file, as far as the file system can, and then writes `tensors` to
// the file piece by piece, in the given order. The file gets its name only when the file is
// complete and durable. If anything fails, an older file of the same name stays unchanged. If
// `path` is a symbolic link, the link stays, and its target is written.
// Fails with:
// - kInvalidArgument: a type is not "F32", "BF16", "F16" or "I16", or a name comes twice.
// - kInvalidArgument: a name or a text is not UTF-8, or `bytes` has no function.
// - kInvalidArgument: the tensors have more bytes than a file can have.
// - kInput, kNoSpace or kIo: the file cannot be written.
// - kInput: `path` names something other than a regular file.
// - The errors that `bytes` throws.
SLUICE_EXPORT void write_safetensors_file(const std::string& path,
                                          std::span<const SafetensorsTensor> tensors,
                                          const std::map<std::string, std::string>& metadata,
                                          const SafetensorsBytes& bytes);

}  // namespace sluice
