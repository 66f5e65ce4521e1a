#include "tools/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/unique_fd.h"

namespace sluice {
namespace {

using nlohmann::json;
constexpr std::uint64_t kPieceElements = 256 << 10;

// The file under its temporary name; removed unless it is renamed into place.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& target)
      : target_(target), name_(fmt::format("{}.{}.tmp", target, ::getpid())) {
    descriptor_ = UniqueFd(::open(name_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (!descriptor_)
      throw Error(
          ErrorCode::kInput,
          fmt::format("cannot create \"{}\": {}; check that its folder exists and is writable",
                      name_, errno_text(errno)));
  }

  ~TemporaryFile() {
    if (!name_.empty()) ::unlink(name_.c_str());
  }

  void write(const void* data, std::uint64_t size_bytes) {
    const auto* next = static_cast<const char*>(data);
    while (size_bytes != 0) {
      const ssize_t written = ::write(descriptor_.get(), next, size_bytes);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail("write");
      next += written;
      size_bytes -= static_cast<std::uint64_t>(written);
    }
  }

  void commit() {
    if (::fsync(descriptor_.get()) != 0) fail("fsync");
    if (::rename(name_.c_str(), target_.c_str()) != 0) fail("rename");
    name_.clear();
    const std::filesystem::path folder = std::filesystem::absolute(target_).parent_path();
    const UniqueFd directory(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (directory)
      (void)::fsync(
          directory.get());  // the name is durable too; some file systems refuse, and need not
  }

 private:
  [[noreturn]] void fail(const char* what) const {
    const ErrorCode code =
        errno == ENOSPC || errno == EDQUOT ? ErrorCode::kNoSpace : ErrorCode::kIo;
    throw Error(code, fmt::format("{} of \"{}\" failed: {}; \"{}\" is unchanged", what, name_,
                                  errno_text(errno), target_));
  }

  std::string target_;
  std::string name_;
  UniqueFd descriptor_;
};

}  // namespace

std::uint64_t SavedTensor::element_count() const {
  std::uint64_t count = 1;
  for (const std::uint64_t extent : shape) count *= extent;
  return count;
}

void write_safetensors(const std::string& path, std::span<const SavedTensor> tensors,
                       const std::map<std::string, std::string>& metadata,
                       const TensorSource& source) {
  nlohmann::ordered_json header;
  header["__metadata__"] = metadata;
  std::uint64_t offset = 0;
  for (const SavedTensor& tensor : tensors) {
    const std::uint64_t end = offset + tensor.element_count() * sizeof(float);
    header[tensor.name] = {
        {"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // data starts at a multiple of 8
  std::array<unsigned char, 8> length{};
  for (std::size_t i = 0; i < length.size(); ++i)
    length[i] = static_cast<unsigned char>(text.size() >> (8 * i));
  TemporaryFile file(path);
  file.write(length.data(), length.size());
  file.write(text.data(), text.size());
  std::vector<float> piece(kPieceElements);
  for (std::size_t index = 0; index < tensors.size(); ++index) {
    const std::uint64_t count = tensors[index].element_count();
    for (std::uint64_t first = 0; first < count; first += kPieceElements) {
      const auto values = std::span(piece).first(std::min(kPieceElements, count - first));
      source(index, first, values);
      file.write(values.data(), values.size_bytes());
    }
  }
  file.commit();
}

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path) {
  map_file();
  parse_header();
}

SafetensorsFile::~SafetensorsFile() {
  if (mapping_ != nullptr) ::munmap(const_cast<unsigned char*>(mapping_), mapping_bytes_);
}

void SafetensorsFile::map_file() {
  const UniqueFd file(::open(path_.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status {};
  if (!file || ::fstat(file.get(), &status) != 0)
    throw Error(ErrorCode::kInput,
                fmt::format("cannot open the model file \"{}\": {}", path_, errno_text(errno)));
  mapping_bytes_ = static_cast<std::uint64_t>(status.st_size);
  void* mapping = mapping_bytes_ < 8
                      ? MAP_FAILED
                      : ::mmap(nullptr, mapping_bytes_, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (mapping == MAP_FAILED)
    throw Error(ErrorCode::kInput, fmt::format("\"{}\" is no safetensors file: it has {} bytes",
                                               path_, mapping_bytes_));
  mapping_ = static_cast<const unsigned char*>(mapping);
}

void SafetensorsFile::parse_header() {
  const auto fail = [&](const std::string& why) {
    throw Error(ErrorCode::kInput,
                fmt::format("\"{}\" is no usable safetensors file: {}", path_, why));
  };
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < 8; ++i) length |= static_cast<std::uint64_t>(mapping_[i]) << (8 * i);
  if (length > mapping_bytes_ - 8)
    fail(fmt::format("its header claims {} bytes of {}", length, mapping_bytes_));
  const json header =
      json::parse(mapping_ + 8, mapping_ + 8 + length, nullptr, /*allow_exceptions=*/false);
  if (!header.is_object()) fail("its header is not a JSON object");
  const std::uint64_t data_bytes = mapping_bytes_ - 8 - length;
  for (const auto& [name, value] : header.items()) {
    try {
      if (name == "__metadata__") {
        metadata_ = value.get<std::map<std::string, std::string>>();
        continue;
      }
      if (value.at("dtype") != "F32")
        continue;  // attention masks of published checkpoints, for one
      Entry entry{.shape = value.at("shape").get<std::vector<std::uint64_t>>(),
                  .offset_bytes = 0,
                  .size_bytes = 0};
      const auto offsets = value.at("data_offsets").get<std::array<std::uint64_t, 2>>();
      if (offsets[0] > offsets[1] || offsets[1] > data_bytes)
        fail(fmt::format(
            "tensor \"{}\" lies at [{}, {}) of {} data bytes; the file is cut or damaged", name,
            offsets[0], offsets[1], data_bytes));
      entry.offset_bytes = 8 + length + offsets[0];
      entry.size_bytes = offsets[1] - offsets[0];
      if (SavedTensor{name, entry.shape}.element_count() * sizeof(float) != entry.size_bytes)
        fail(fmt::format("tensor \"{}\" has {} bytes, which its shape does not", name,
                         entry.size_bytes));
      entries_.emplace(name, std::move(entry));
    } catch (const json::exception& error) {
      fail(fmt::format("the header entry \"{}\" is malformed: {}", name, error.what()));
    }
  }
}

const SafetensorsFile::Entry& SafetensorsFile::entry(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end())
    throw Error(ErrorCode::kInput, fmt::format("\"{}\" has no F32 tensor \"{}\"", path_, name));
  return found->second;
}

const std::vector<std::uint64_t>& SafetensorsFile::shape(const std::string& name) const {
  return entry(name).shape;
}

void SafetensorsFile::read(const std::string& name, std::uint64_t first_element,
                           std::span<float> values) const {
  const Entry& found = entry(name);
  SLUICE_CHECK(first_element * sizeof(float) + values.size_bytes() <= found.size_bytes,
               "a read stays inside its tensor");
  std::memcpy(values.data(), mapping_ + found.offset_bytes + first_element * sizeof(float),
              values.size_bytes());
}

}  // namespace sluice
