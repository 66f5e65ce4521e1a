// Reads the config.json of a model. Error messages name the file and the key. This header also
// declares UnitBuilder, which builds the units of a model.
//
// Thread rule: a ConfigJson is constant after construction. One thread uses a UnitBuilder.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <sluice/model_spec.h>

namespace sluice {

// The largest number of layers that is accepted. No real model has more layers.
inline constexpr std::uint64_t kLayersMax = 100'000;

class ConfigJson {
 public:
  // `argument` is the path of a config.json, or of a folder that contains a config.json.
  // Fails with kInput if the file cannot be read, is no JSON object, or is nested too deeply.
  explicit ConfigJson(const std::string& argument);
  // `values` is the content of a config.json. `name` is the name that messages give to the file.
  ConfigJson(std::string name, nlohmann::json values)
      : path_(std::move(name)), values_(std::move(values)) {}

  [[noreturn]] void fail(const std::string& why) const;

  const std::string& path() const { return path_; }
  // Returns the value of the key "model_type".
  // Fails with kConfig if the value is missing.
  std::string architecture() const;
  bool has(const char* key) const { return values_.contains(key) && !values_[key].is_null(); }
  const nlohmann::json& operator[](const char* key) const { return values_[key]; }

  // Returns the value of `key`.
  // Fails with kConfig if the value has another type, or is out of range.
  std::uint64_t count(const char* key) const;
  std::uint64_t count_or(const char* key, std::uint64_t fallback) const;
  // Does the same as count_or(), but also accepts 0.
  std::uint64_t count_from_zero(const char* key, std::uint64_t fallback) const;
  bool flag(const char* key, bool fallback) const;
  std::string text_or(const char* key, const std::string& fallback) const;
  // Returns the value of `key`, which is a number of layers from 1 to kLayersMax.
  std::uint64_t layers(const char* key) const;
  // Returns whether the list of numbers at `key` contains `value`. If the list is missing, the
  // result is false.
  bool lists(const char* key, std::uint64_t value) const;
  // Returns a copy of this file. If the value of `key` is an object, the copy also contains the
  // object's keys, except keys that the file already has.
  ConfigJson with_part(const char* key) const;

 private:
  std::string path_;
  nlohmann::json values_;
};

// The largest number of elements of a tensor. No real tensor has more elements. The limit also
// ensures that sums and sizes in bytes do not overflow.
inline constexpr std::uint64_t kElementsMax = std::uint64_t{1} << 48;
// Returns whether a tensor of this shape has at least 1 and at most kElementsMax elements.
bool has_usable_extents(const std::vector<std::uint64_t>& shape);

// Builds one unit. The names of the unit's tensors have a common prefix.
class UnitBuilder {
 public:
  UnitBuilder(std::string name, std::string prefix) : prefix_(std::move(prefix)) {
    unit_.name = std::move(name);
  }

  // Adds one tensor. All add functions fail with kConfig if a tensor has more than kElementsMax
  // elements.
  void add(const std::string& name, std::vector<std::uint64_t> shape);
  // Adds the matrix of a product, and a bias with `bias` values. If `bias` is 0, no bias is added.
  // The caller may exchange `rows` and `columns`.
  void add_matrix(const std::string& name, std::uint64_t rows, std::uint64_t columns,
                  std::uint64_t bias = 0);
  // Adds a norm layer with a weight and a bias.
  void add_norm(const std::string& name, std::uint64_t width);
  // Adds the matrices of all experts. The first extent of `shape` is the number of experts. `used`
  // is the number of experts that each token uses.
  void add_experts(const std::string& name, std::vector<std::uint64_t> shape, std::uint64_t used);

  // The number of elements in the experts that a token does not use.
  double idle_elements() const { return idle_elements_; }
  UnitSpec take() { return std::move(unit_); }

 private:
  UnitSpec unit_;
  std::string prefix_;
  double idle_elements_ = 0;
};

}  // namespace sluice
