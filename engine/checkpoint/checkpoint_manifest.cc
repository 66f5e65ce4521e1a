#include "engine/checkpoint/checkpoint_manifest.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include "base/untrusted_json.h"
#include "engine/checkpoint/safetensors_header.h"

namespace sluice {
namespace {

using nlohmann::json;

constexpr std::string_view kFormat = "sluice checkpoint";
constexpr std::uint64_t kVersion = 1;
// With numbers of updates by tensor, which readers of version 1 would overlook.
constexpr std::uint64_t kVersionWithUpdates = 2;
// The text carries this itself, beside its other fields.
const std::string kChecksum = "checksum";
const std::string kSha256 = "sha256";

constexpr DType kTypes[] = {DType::kFp32, DType::kBf16, DType::kFp16};
constexpr CheckpointPart kParts[] = {CheckpointPart::kWeight, CheckpointPart::kMaster,
                                     CheckpointPart::kMasterLow, CheckpointPart::kExpAvg,
                                     CheckpointPart::kExpAvgSq};
constexpr OptimizerKind kOptimizers[] = {OptimizerKind::kAdamW, OptimizerKind::kAdam,
                                         OptimizerKind::kLion, OptimizerKind::kAdagrad,
                                         OptimizerKind::kSgd};
constexpr OptimizerState kStates[] = {OptimizerState::kFp32, OptimizerState::kBf16,
                                      OptimizerState::k8bit};

std::string sum_of(const json& document) {
  const std::string text = document.dump();
  return hex_of(checksum128(std::as_bytes(std::span(text))));
}

json json_of(const CheckpointManifest::Stored& stored) {
  json pieces = json::array();
  for (const CheckpointManifest::Piece& piece : stored.pieces)
    pieces.push_back({piece.first_element, piece.element_count, hex_of(piece.sum)});
  json document{{"tensor", stored.tensor},
                {"part", name_of(stored.part)},
                {"file", stored.file},
                {"dtype", stored.dtype},
                {"begin_bytes", stored.begin_bytes},
                {"pieces", std::move(pieces)}};
  if (!stored.sha256.empty()) document[kSha256] = stored.sha256;
  return document;
}

// Reads fields, and names the one that is wrong.
class Reader {
 public:
  Reader(const std::string& path, std::string where, const json& value)
      : path_(path), where_(std::move(where)), value_(value) {}

  Reader at(const std::string& key) const {
    if (!value_.is_object()) fail("an object");
    const auto found = value_.find(key);
    if (found == value_.end())
      throw Error(ErrorCode::kInput,
                  fmt::format("\"{}\": field \"{}{}{}\" is missing; {}", path_, where_,
                              where_.empty() ? "" : ".", key, kCheckpointRemedy));
    return {path_, where_.empty() ? key : where_ + "." + key, *found};
  }
  std::vector<Reader> elements() const {
    if (!value_.is_array()) fail("a list");
    std::vector<Reader> all;
    for (std::size_t i = 0; i < value_.size(); ++i)
      all.emplace_back(path_, fmt::format("{}[{}]", where_, i), value_[i]);
    return all;
  }
  std::string text() const {
    if (!value_.is_string()) fail("a text");
    return value_.get<std::string>();
  }
  std::uint64_t integer(std::uint64_t most = ~std::uint64_t{0}) const {
    if (!value_.is_number_unsigned() || value_.get<std::uint64_t>() > most)
      fail(most == ~std::uint64_t{0} ? "a number that is not negative"
                                     : fmt::format("a whole number of at most {}", most));
    return value_.get<std::uint64_t>();
  }
  double number() const {
    if (!value_.is_number()) fail("a number");
    return value_.get<double>();
  }
  bool boolean() const {
    if (!value_.is_boolean()) fail("true or false");
    return value_.get<bool>();
  }
  Checksum128 sum() const {
    const std::string digits = text();
    Checksum128 sum;
    const auto parse = [](const char* begin, std::uint64_t& value) {
      const auto parsed = std::from_chars(begin, begin + 16, value, 16);
      return parsed.ec == std::errc{} && parsed.ptr == begin + 16;
    };
    if (digits.size() != 32 || !parse(digits.data(), sum.high) ||
        !parse(digits.data() + 16, sum.low))
      fail("32 hexadecimal digits");
    return sum;
  }
  // Returns the entry of `all` whose name the text is.
  template <class Named, class Name>
  auto one_of(const Named& all, const Name& name) const {
    const std::string found = text();
    std::vector<std::string_view> names;
    for (const auto& entry : all) {
      if (name(entry) == found) return entry;
      names.push_back(name(entry));
    }
    fail(fmt::format("one of {}", fmt::join(names, ", ")));
  }
  const json& value() const { return value_; }
  [[noreturn]] void fail(const std::string& expected) const {
    std::string found = value_.dump();
    if (found.size() > 60) found = found.substr(0, 60) + "...";
    throw Error(ErrorCode::kInput, fmt::format("\"{}\": field \"{}\" is {}, expected {}; {}", path_,
                                               where_, found, expected, kCheckpointRemedy));
  }

 private:
  const std::string& path_;
  std::string where_;
  const json& value_;
};

StateDescription read_state_description(const Reader& top) {
  StateDescription state;
  state.parameter = top.at("precision").one_of(kTypes, [](auto type) { return name_of(type); });
  state.optimizer =
      top.at("optimizer").at("type").one_of(kOptimizers, [](auto kind) { return name_of(kind); });
  // Older versions knew only fp32, and did not say so.
  if (top.at("optimizer").value().contains("state"))
    state.moments = top.at("optimizer").at("state").one_of(kStates, [](auto moments) {
      return name_of(moments);
    });
  for (const Reader& tensor : top.at("model").elements()) {
    StateDescription::Tensor& added = state.tensors.emplace_back();
    added.name = tensor.at("name").text();
    for (const Reader& extent : tensor.at("shape").elements())
      added.shape.push_back(extent.integer());
    added.is_frozen = tensor.at("frozen").boolean();
    added.is_opaque = tensor.value().contains("opaque") && tensor.at("opaque").boolean();
  }
  return state;
}

CheckpointManifest::Stored read_stored(const Reader& entry, std::uint64_t files) {
  CheckpointManifest::Stored stored;
  stored.tensor = entry.at("tensor").text();
  stored.part = entry.at("part").one_of(kParts, [](auto part) { return name_of(part); });
  stored.file = static_cast<std::uint32_t>(entry.at("file").integer(files - 1));
  stored.dtype = entry.at("dtype").text();
  if (safetensors_element_bytes(stored.dtype) == 0) entry.at("dtype").fail("a type of this format");
  stored.begin_bytes = entry.at("begin_bytes").integer();
  std::uint64_t next = 0;
  for (const Reader& piece : entry.at("pieces").elements()) {
    const std::vector<Reader> fields = piece.elements();
    if (fields.size() != 3) piece.fail("[first element, count, checksum]");
    if (fields[0].integer() != next) fields[0].fail(std::to_string(next));
    const std::uint64_t count = fields[1].integer(std::uint64_t{1} << 40);
    if (count == 0) fields[1].fail("at least 1");
    stored.pieces.push_back(
        {.first_element = next, .element_count = count, .sum = fields[2].sum()});
    next += count;
  }
  return stored;
}

}  // namespace

std::string_view name_of(CheckpointPart part) {
  switch (part) {
    case CheckpointPart::kWeight: return "weight";
    case CheckpointPart::kMaster: return "master";
    case CheckpointPart::kMasterLow: return "master_low";
    case CheckpointPart::kExpAvg: return "exp_avg";
    case CheckpointPart::kExpAvgSq: break;
  }
  return "exp_avg_sq";
}

std::string manifest_text(const CheckpointManifest& manifest) {
  const auto& updates = manifest.position.tensor_updates;
  json document{{"format", kFormat},
                {"version", updates.empty() ? kVersion : kVersionWithUpdates},
                {"step", manifest.position.step}};
  if (!updates.empty()) document["tensor_updates"] = updates;
  if (const auto& scale = manifest.position.loss_scale)
    document["loss_scale"] = {{"scale", scale->scale},
                              {"hysteresis_left", scale->hysteresis_left},
                              {"good_steps", scale->good_steps}};
  document["precision"] = name_of(manifest.state.parameter);
  document["optimizer"] = {{"type", name_of(manifest.state.optimizer)},
                           {"state", name_of(manifest.state.moments)},
                           {"hyperparameters", manifest.hyperparameters}};
  document["model"] = json::array();
  for (const StateDescription::Tensor& tensor : manifest.state.tensors) {
    document["model"].push_back(
        {{"name", tensor.name}, {"shape", tensor.shape}, {"frozen", tensor.is_frozen}});
    if (tensor.is_opaque) document["model"].back()["opaque"] = true;
  }
  document["application"] = manifest.application;
  document["files"] = json::array();
  for (const CheckpointManifest::File& file : manifest.files) {
    document["files"].push_back({{"name", file.name},
                                 {"size_bytes", file.size_bytes},
                                 {"header_bytes", file.beginning_bytes},
                                 {"header_checksum", hex_of(file.beginning)}});
    if (!file.sha256.empty()) document["files"].back()[kSha256] = file.sha256;
  }
  document["tensors"] = json::array();
  for (const CheckpointManifest::Stored& stored : manifest.stored)
    document["tensors"].push_back(json_of(stored));
  try {
    document[kChecksum] = sum_of(document);
    return document.dump() + "\n";
  } catch (const json::type_error& error) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("save: the application's text is not UTF-8: {}", error.what()));
  }
}

CheckpointManifest parse_manifest(std::string_view text, const std::string& path) {
  json document = parse_untrusted_json<json>(text);
  if (!document.is_object())
    throw Error(ErrorCode::kDamaged,
                fmt::format("\"{}\" is not a JSON object in its {} bytes: it is cut short, damaged "
                            "or not a manifest; {}",
                            path, text.size(), kCheckpointRemedy));
  const Reader top(path, "", document);
  if (top.at("format").text() != kFormat) top.at("format").fail(fmt::format("\"{}\"", kFormat));
  const std::uint64_t version = top.at("version").integer();
  if (version != kVersion && version != kVersionWithUpdates)
    top.at("version").fail(
        fmt::format("{} or {}, which this version of Sluice reads", kVersion, kVersionWithUpdates));
  const std::string written = top.at(kChecksum).text();
  document.erase(kChecksum);
  if (const std::string found = sum_of(document); found != written)
    throw Error(ErrorCode::kDamaged,
                fmt::format("\"{}\": field \"{}\" is {}, but the text has {}: it is damaged, or "
                            "was changed by hand; {}",
                            path, kChecksum, written, found, kCheckpointRemedy));
  CheckpointManifest manifest;
  manifest.position.step = top.at("step").integer();
  if (version == kVersionWithUpdates) {
    for (const auto& [tensor, count] : top.at("tensor_updates").value().items())
      manifest.position.tensor_updates[tensor] = top.at("tensor_updates").at(tensor).integer();
  }
  if (document.contains("loss_scale")) {
    const Reader scale = top.at("loss_scale");
    manifest.position.loss_scale = {
        .scale = scale.at("scale").number(),
        .hysteresis_left = static_cast<std::uint32_t>(scale.at("hysteresis_left").integer(~0u)),
        .good_steps = static_cast<std::uint32_t>(scale.at("good_steps").integer(~0u))};
  }
  manifest.state = read_state_description(top);
  for (const auto& [name, value] : top.at("optimizer").at("hyperparameters").value().items())
    manifest.hyperparameters[name] = value.is_number() ? value.get<double>() : 0;
  for (const Reader& entry : top.at("application").elements())
    manifest.application.push_back(entry.text());
  for (const Reader& file : top.at("files").elements()) {
    const std::string name = file.at("name").text();
    if (name.empty() || name.find('/') != std::string::npos || name[0] == '.')
      file.at("name").fail("a file of the checkpoint's folder");
    manifest.files.push_back({.name = name,
                              .size_bytes = file.at("size_bytes").integer(),
                              .beginning = file.at("header_checksum").sum(),
                              .beginning_bytes = file.at("header_bytes").integer()});
  }
  if (manifest.files.empty()) top.at("files").fail("at least one file");
  for (const Reader& entry : top.at("tensors").elements())
    manifest.stored.push_back(read_stored(entry, manifest.files.size()));
  return manifest;
}

}  // namespace sluice
