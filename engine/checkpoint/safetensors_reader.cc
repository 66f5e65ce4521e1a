#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>
#include <tuple>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/dtype.h>
#include <sluice/error.h>
#include <sluice/safetensors.h>
#include <sluice/units.h>
#include "base/text_file.h"
#include "base/untrusted_json.h"
#include "engine/checkpoint/resolved_folder.h"
#include "engine/checkpoint/safetensors_file.h"

namespace sluice {
namespace {

constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr const char* kSingleName = "model.safetensors";
constexpr std::uint64_t kIndexBytesMax = 1_GiB;  // far more than any has
constexpr std::uint64_t kPieceElements = 64 << 10;

[[noreturn]] void fail_reading(const std::string& path, const std::string& why) {
  throw Error(ErrorCode::kInput, fmt::format("\"{}\": {}", path, why));
}

// Tensor -> file, from the index.
std::map<std::string, std::string> read_index(const std::string& path) {
  std::error_code unknown;
  if (!std::filesystem::is_regular_file(path, unknown))  // a pipe's reader waits for a writer
    fail_reading(path, "it is no regular file; copy the model again");
  std::string why;
  const auto text = read_text_file(path, kIndexBytesMax, why);
  if (!text) fail_reading(path, fmt::format("it cannot be read: {}; copy the model again", why));
  const auto index = parse_untrusted_json<nlohmann::json>(*text);
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (map == index.end() || !map->is_object() || map->empty())
    fail_reading(path, "field \"weight_map\" is missing: it is no index of safetensors files");
  std::map<std::string, std::string> files;
  for (const auto& [tensor, name] : map->items()) {
    const std::string file_name = name.is_string() ? name.get<std::string>() : std::string();
    if (file_name.empty() || file_name.find('/') != std::string::npos || file_name == "..")
      fail_reading(path,
                   fmt::format("field \"weight_map.{}\" is {}, expected the name of a file in the "
                               "same folder",
                               tensor, name.dump()));
    files[tensor] = file_name;
  }
  return files;
}

// Differs for two files of the same name, and for a file before and after a write.
using FileState = std::tuple<bool, ino_t, off_t, time_t, long>;
FileState state_of(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return {};
  return {true, status.st_ino, status.st_size, status.st_mtim.tv_sec, status.st_mtim.tv_nsec};
}

void convert(const std::string& dtype, const std::byte* bytes, std::span<float> values) {
  if (dtype == "F32") {
    std::memcpy(values.data(), bytes, values.size_bytes());
    return;
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::uint16_t half = 0;
    std::memcpy(&half, bytes + i * sizeof half, sizeof half);
    values[i] = dtype == "BF16" ? float_from_bf16(half) : float_from_fp16(half);
  }
}

}  // namespace

std::uint64_t SafetensorsTensor::element_count() const {
  std::uint64_t count = 1;
  for (const std::uint64_t extent : shape) count *= extent;
  return count;
}

struct SafetensorsReader::Content {
  struct Place {
    SafetensorsTensor tensor;
    const SafetensorsFile* file = nullptr;
    const SafetensorsFile::Entry* entry = nullptr;
  };

  void add(const std::string& name, const SafetensorsFile& file,
           const SafetensorsFile::Entry& entry) {
    places[name] = {.tensor = {.name = name, .dtype = entry.dtype, .shape = entry.shape},
                    .file = &file,
                    .entry = &entry};
  }
  const SafetensorsFile& open(const std::string& file_path) {
    files.push_back(std::make_unique<SafetensorsFile>(file_path));
    return *files.back();
  }
  void open_single(const std::string& file_path) {
    const SafetensorsFile& file = open(file_path);
    for (const auto& [name, entry] : file.entries()) add(name, file, entry);
  }
  void open_indexed(const std::string& folder) {
    const std::string index = folder + "/" + kIndexName;
    const FileState before = state_of(index);
    std::map<std::string, const SafetensorsFile*> opened;
    for (const auto& [name, file_name] : read_index(index)) {
      const SafetensorsFile*& file = opened[file_name];
      if (file == nullptr) file = &open(folder + "/" + file_name);
      const SafetensorsFile::Entry* const entry = file->find(name);
      if (entry == nullptr)
        fail_reading(
            index, fmt::format("field \"weight_map\" has \"{}\" in \"{}\", which has no tensor of "
                               "that name",
                               name, file_name));
      add(name, *file, *entry);
    }
    if (state_of(index) != before)
      fail_reading(index,
                   "it was written anew while the files that it names were opened, which may be of "
                   "two models; open the folder again when it is whole");
  }
  void open_folder() {
    const std::string folder = resolved_folder(path);
    std::error_code error;
    if (std::filesystem::exists(folder + "/" + kIndexName, error))
      open_indexed(folder);
    else if (std::filesystem::exists(folder + "/" + kSingleName, error))
      open_single(folder + "/" + kSingleName);
    else
      fail_reading(path, fmt::format("the folder has neither {} nor {}", kIndexName, kSingleName));
  }
  const Place& find(const std::string& name) const {
    const auto found = places.find(name);
    if (found == places.end()) fail_reading(path, fmt::format("there is no tensor \"{}\"", name));
    return found->second;
  }

  std::string path;
  bool is_folder = false;
  std::vector<std::unique_ptr<SafetensorsFile>> files;
  std::map<std::string, Place> places;
};

SafetensorsReader::SafetensorsReader(const std::string& path)
    : content_(std::make_unique<Content>()) {
  content_->path = path;
  std::error_code error;
  content_->is_folder = std::filesystem::is_directory(path, error);
  if (content_->is_folder)
    content_->open_folder();
  else
    content_->open_single(path);
}

SafetensorsReader::~SafetensorsReader() = default;
SafetensorsReader::SafetensorsReader(SafetensorsReader&& other) noexcept = default;
SafetensorsReader& SafetensorsReader::operator=(SafetensorsReader&& other) noexcept = default;

const std::string& SafetensorsReader::path() const {
  return content_->path;
}

bool SafetensorsReader::is_folder() const {
  return content_->is_folder;
}

const std::map<std::string, std::string>& SafetensorsReader::metadata() const {
  return content_->files.front()->metadata();
}

std::vector<std::string> SafetensorsReader::names() const {
  std::vector<std::string> names;
  for (const auto& [name, place] : content_->places) names.push_back(name);
  return names;
}

const SafetensorsTensor* SafetensorsReader::find(const std::string& name) const {
  const auto found = content_->places.find(name);
  return found == content_->places.end() ? nullptr : &found->second.tensor;
}

void SafetensorsReader::read(const std::string& name, std::uint64_t first_element,
                             std::span<float> values) const {
  const Content::Place& place = content_->find(name);
  const std::string& dtype = place.tensor.dtype;
  if (dtype != "F32" && dtype != "BF16" && dtype != "F16")
    fail_reading(
        place.file->path(),
        fmt::format("tensor \"{}\" is of type \"{}\", expected F32, BF16 or F16", name, dtype));
  const std::uint64_t element_bytes = safetensors_element_bytes(dtype);
  const std::uint64_t element_count = place.entry->size_bytes / element_bytes;
  if (first_element > element_count || values.size() > element_count - first_element)
    fail_reading(place.file->path(),
                 fmt::format("{} elements from element {} on reach beyond the end of tensor "
                             "\"{}\", which has {}",
                             values.size(), first_element, name, element_count));
  std::vector<std::byte> bytes(std::min<std::uint64_t>(values.size(), kPieceElements) *
                               element_bytes);
  for (std::uint64_t at = 0; at < values.size(); at += kPieceElements) {
    const std::uint64_t count = std::min<std::uint64_t>(kPieceElements, values.size() - at);
    const auto piece = std::span(bytes).first(count * element_bytes);
    read_bytes(name, (first_element + at) * element_bytes, piece);
    convert(dtype, piece.data(), values.subspan(at, count));
  }
}

void SafetensorsReader::read_bytes(const std::string& name, std::uint64_t first_byte,
                                   std::span<std::byte> bytes) const {
  const Content::Place& place = content_->find(name);
  const std::uint64_t size = place.entry->size_bytes;
  if (first_byte > size || bytes.size() > size - first_byte)
    fail_reading(place.file->path(),
                 fmt::format("{} B from byte {} on reach beyond the end of tensor "
                             "\"{}\", which has {} B",
                             bytes.size(), first_byte, name, size));
  place.file->read_bytes(*place.entry, first_byte, bytes);
}

}  // namespace sluice
