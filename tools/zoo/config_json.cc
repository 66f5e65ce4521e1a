#include "tools/zoo/config_json.h"

#include <algorithm>
#include <filesystem>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/config_document.h>
#include <sluice/error.h>

namespace sluice {
namespace {

using nlohmann::json;

// Far more than any model has, and few enough that no product of two overflows.
constexpr std::uint64_t kExtentMax = 1 << 28;
// Deeper than any config, and shallow enough for what handles values by recursion.
constexpr int kDepthMax = 64;

}  // namespace

ConfigJson::ConfigJson(const std::string& argument) : path_(argument) {
  if (std::filesystem::is_directory(path_)) path_ = (std::filesystem::path(path_) / "config.json");
  const auto check_depth = [this](int depth, json::parse_event_t, json&) {
    if (depth > kDepthMax)
      throw Error(ErrorCode::kInput, fmt::format("\"{}\" is nested more than {} deep, which no "
                                                 "config.json of a model is",
                                                 path_, kDepthMax));
    return true;
  };
  values_ =
      json::parse(ConfigDocument::text_of_file(path_), check_depth, /*allow_exceptions=*/false);
  if (!values_.is_object())
    throw Error(ErrorCode::kInput, fmt::format("\"{}\" is no JSON object; --model wants the "
                                               "config.json of a model",
                                               path_));
}

void ConfigJson::fail(const std::string& why) const {
  throw Error(ErrorCode::kConfig, fmt::format("{}: {}", path_, why));
}

std::string ConfigJson::architecture() const {
  const auto type = values_.find("model_type");
  if (type == values_.end() || !type->is_string()) fail("\"model_type\" is missing");
  return type->get<std::string>();
}

std::uint64_t ConfigJson::count(const char* key) const {
  if (!has(key)) fail(fmt::format("\"{}\" is missing", key));
  const json& value = values_[key];
  if (!value.is_number_unsigned() || value == 0 || value > kExtentMax)
    fail(fmt::format("\"{}\" is {}, but must be a number from 1 to {}", key,
                     value.is_structured() ? value.type_name() : value.dump(), kExtentMax));
  return value.get<std::uint64_t>();
}

std::uint64_t ConfigJson::count_or(const char* key, std::uint64_t fallback) const {
  return has(key) ? count(key) : fallback;
}

std::uint64_t ConfigJson::count_from_zero(const char* key, std::uint64_t fallback) const {
  return has(key) && values_[key] == 0 ? 0 : count_or(key, fallback);
}

bool ConfigJson::flag(const char* key, bool fallback) const {
  if (!has(key)) return fallback;
  if (!values_[key].is_boolean()) fail(fmt::format("\"{}\" is no boolean", key));
  return values_[key].get<bool>();
}

std::string ConfigJson::text_or(const char* key, const std::string& fallback) const {
  if (!has(key)) return fallback;
  if (!values_[key].is_string()) fail(fmt::format("\"{}\" is no text", key));
  return values_[key].get<std::string>();
}

std::uint64_t ConfigJson::layers(const char* key) const {
  const std::uint64_t layers = count(key);
  if (layers > kLayersMax) fail(fmt::format("{} layers are too many", layers));
  return layers;
}

bool ConfigJson::lists(const char* key, std::uint64_t value) const {
  if (!has(key)) return false;
  if (!values_[key].is_array()) fail(fmt::format("\"{}\" is no list", key));
  return std::ranges::find(values_[key], json(value)) != values_[key].end();
}

ConfigJson ConfigJson::with_part(const char* key) const {
  ConfigJson all = *this;
  if (!has(key) || !values_[key].is_object()) return all;
  all.values_ = values_[key];
  all.values_.update(values_);
  return all;
}

bool has_usable_extents(const std::vector<std::uint64_t>& shape) {
  std::uint64_t rest = kElementsMax;
  for (const std::uint64_t extent : shape) {
    if (extent == 0 || extent > rest) return false;
    rest /= extent;
  }
  return true;
}

void UnitBuilder::add(const std::string& name, std::vector<std::uint64_t> shape) {
  if (!has_usable_extents(shape))
    throw Error(
        ErrorCode::kConfig,
        fmt::format("tensor \"{}{}\" would have the shape [{}], but a tensor has from 1 to {} "
                    "elements; check the sizes in the model's config",
                    prefix_, name, fmt::join(shape, ", "), kElementsMax));
  unit_.tensors.push_back({.name = prefix_ + name, .shape = std::move(shape)});
}

void UnitBuilder::add_matrix(const std::string& name, std::uint64_t rows, std::uint64_t columns,
                             std::uint64_t bias) {
  add(name + ".weight", {rows, columns});
  if (bias != 0) add(name + ".bias", {bias});
}

void UnitBuilder::add_norm(const std::string& name, std::uint64_t width) {
  add(name + ".weight", {width});
  add(name + ".bias", {width});
}

void UnitBuilder::add_experts(const std::string& name, std::vector<std::uint64_t> shape,
                              std::uint64_t used) {
  const std::uint64_t experts = shape.front();
  add(name, std::move(shape));
  idle_elements_ += static_cast<double>(unit_.tensors.back().element_count()) *
                    static_cast<double>(experts - std::min(used, experts)) /
                    static_cast<double>(experts);
}

}  // namespace sluice
