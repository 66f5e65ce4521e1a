#include "engine/checkpoint/safetensors_header.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include <sluice/units.h>

namespace sluice {
namespace {

using nlohmann::json;

// No tensor of any model has so many extents.
constexpr std::size_t kExtentsMax = 64;
constexpr std::string_view kMetadata = "__metadata__";

[[noreturn]] void fail_header(const std::string& why) {
  throw Error(ErrorCode::kInput, why);
}

// {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...,
//  "__metadata__": {"key": "value", ...}}
class HeaderReader : public json::json_sax_t {
 public:
  SafetensorsHeader take() { return std::move(header_); }

  bool key(std::string& name) override {
    if (depth_ == 1) {
      name_ = name;
      is_metadata_ = name == kMetadata;
      if (!is_metadata_ && !header_.tensors.try_emplace(name).second)
        fail_header(fmt::format("tensor \"{}\" occurs twice", name));
    }
    field_ = name;
    return true;
  }

  bool start_object(std::size_t) override {
    if (depth_ == 2) malformed("an object where the format allows none");
    ++depth_;
    has_dtype_ = has_shape_ = has_offsets_ = false;
    return true;
  }
  bool end_object() override {
    --depth_;
    if (depth_ == 1 && !is_metadata_ && !(has_dtype_ && has_shape_ && has_offsets_))
      malformed("dtype, shape or data_offsets is missing");
    return true;
  }

  bool start_array(std::size_t) override {
    if (depth_ == 0) fail_header("its header is not a JSON object");
    if (depth_ != 2 || is_metadata_ || numbers_) malformed("a list where the format allows none");
    numbers_.emplace();
    return true;
  }
  bool end_array() override {
    HeaderTensor& tensor = header_.tensors.at(name_);
    if (field_ == "shape") {
      tensor.shape = std::move(*numbers_);
      has_shape_ = true;
    } else if (field_ == "data_offsets") {
      if (numbers_->size() != 2) malformed("data_offsets does not have two entries");
      tensor.begin_bytes = numbers_->front();
      tensor.end_bytes = numbers_->back();
      has_offsets_ = true;
    }
    numbers_.reset();
    return true;
  }

  bool number_unsigned(json::number_unsigned_t value) override {
    if (!numbers_) malformed("a number where the format allows none");
    if (numbers_->size() == kExtentsMax) malformed("its list of numbers is too long");
    numbers_->push_back(value);
    return true;
  }
  bool string(std::string& value) override {
    if (depth_ == 0) fail_header("its header is not a JSON object");
    if (depth_ != 2 || numbers_) malformed("a text where the format allows none");
    if (is_metadata_) {
      header_.metadata[field_] = value;
    } else if (field_ == "dtype") {
      header_.tensors.at(name_).dtype = value;
      has_dtype_ = true;
    }
    return true;
  }

  bool null() override { return misplaced("null"); }
  bool boolean(bool) override { return misplaced("a boolean"); }
  bool number_integer(json::number_integer_t) override { return misplaced("a negative number"); }
  bool number_float(json::number_float_t, const std::string&) override {
    return misplaced("a number with a fraction");
  }
  bool binary(json::binary_t&) override { return misplaced("binary data"); }
  bool parse_error(std::size_t position, const std::string&, const json::exception&) override {
    fail_header(
        fmt::format("its header is not a JSON object: byte {} of it is not JSON", position));
  }

 private:
  bool misplaced(std::string_view what) const {
    if (depth_ == 0) fail_header("its header is not a JSON object");
    malformed(fmt::format("{} where the format allows none", what));
  }
  [[noreturn]] void malformed(std::string_view why) const {
    fail_header(fmt::format("the header entry \"{}\" is malformed: {}", name_, why));
  }

  SafetensorsHeader header_;
  int depth_ = 0;
  bool is_metadata_ = false;
  bool has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
  std::string name_;                                   // of the tensor
  std::string field_;                                  // of its entry
  std::optional<std::vector<std::uint64_t>> numbers_;  // of the open list
};

void refuse_overlaps(const SafetensorsHeader& header) {
  using Place = std::pair<const std::string, HeaderTensor>;
  std::vector<const Place*> places;
  for (const Place& place : header.tensors) places.push_back(&place);
  std::ranges::sort(places, {}, [](const Place* place) { return place->second.begin_bytes; });
  const Place* last = nullptr;  // the one with the last end so far
  for (const Place* const place : places) {
    const auto& [next_name, next] = *place;
    if (next.begin_bytes == next.end_bytes) continue;
    if (last == nullptr || next.begin_bytes >= last->second.end_bytes) {
      last = place;
      continue;
    }
    const auto& [name, before] = *last;
    fail_header(fmt::format("tensors \"{}\" [{}, {}) and \"{}\" [{}, {}) share bytes", name,
                            before.begin_bytes, before.end_bytes, next_name, next.begin_bytes,
                            next.end_bytes));
  }
}

}  // namespace

std::uint64_t safetensors_element_bytes(std::string_view dtype) {
  constexpr std::pair<std::string_view, std::uint64_t> kTypes[] = {
      {"F32", 4}, {"BF16", 2}, {"F16", 2}, {"I16", 2}};
  for (const auto& [name, bytes] : kTypes) {
    if (name == dtype) return bytes;
  }
  return 0;
}

std::uint64_t SafetensorsEntry::size_bytes() const {
  std::uint64_t bytes = safetensors_element_bytes(dtype);
  for (const std::uint64_t extent : shape) bytes *= extent;
  return bytes;
}

std::string safetensors_beginning(std::span<const SafetensorsEntry> entries,
                                  const std::map<std::string, std::string>& metadata,
                                  std::uint64_t align_bytes) {
  nlohmann::ordered_json header;
  header["__metadata__"] = metadata;
  std::uint64_t offset = 0;
  for (const SafetensorsEntry& entry : entries) {
    const std::uint64_t end = offset + entry.size_bytes();
    header[entry.name] = {
        {"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.resize(align_up(8 + text.size(), align_bytes) - 8, ' ');
  std::string length;
  for (int i = 0; i < 8; ++i) length += static_cast<char>(text.size() >> (8 * i));
  return length + text;
}

SafetensorsHeader parse_safetensors_header(std::string_view text) {
  // The parser takes it for the end of the text.
  if (text.find('\0') != std::string_view::npos) fail_header("its header has a NUL byte in it");
  HeaderReader reader;
  json::sax_parse(text.begin(), text.end(), &reader);
  SafetensorsHeader header = reader.take();
  refuse_overlaps(header);
  return header;
}

}  // namespace sluice
