// The config.json of a model, with messages that name the file and the key. This header also has
// the builder of a model's units.
//
// Thread rule: a file is constant after construction. One thread uses a builder.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <sluice/model_spec.h>

namespace sluice {

// A number of layers that no model exceeds.
inline constexpr std::uint64_t kLayersMax = 100'000;

class ConfigJson {
 public:
  // `argument` is a config.json or a folder with one.
  // Fails with kInput if the file cannot be read, is no JSON object, or is nested too deep.
  explicit ConfigJson(const std::string& argument);
  // `values` are the values of a config.json. Messages call the file `name`.
  ConfigJson(std::string name, nlohmann::json values)
      : path_(std::move(name)), values_(std::move(values)) {}

  [[noreturn]] void fail(const std::string& why) const;

  const std::string& path() const { return path_; }
  // The value of "model_type".
  // Fails with kConfig if the value is missing.
  std::string architecture() const;
  bool has(const char* key) const { return values_.contains(key) && !values_[key].is_null(); }
  const nlohmann::json& operator[](const char* key) const { return values_[key]; }

  // Fails with kConfig if the value has another type, or is out of range.
  std::uint64_t count(const char* key) const;
  std::uint64_t count_or(const char* key, std::uint64_t fallback) const;
  // Does the work of count_or(), but also accepts 0.
  std::uint64_t count_from_zero(const char* key, std::uint64_t fallback) const;
  bool flag(const char* key, bool fallback) const;
  std::string text_or(const char* key, const std::string& fallback) const;
  // A number of layers, at most kLayersMax.
  std::uint64_t layers(const char* key) const;
  // Whether `key`, a list of numbers, has `value`. A missing list has no values.
  bool lists(const char* key, std::uint64_t value) const;
  // Returns this file together with the keys that only the object `key` has. Without such an
  // object, the result is this file.
  ConfigJson with_part(const char* key) const;

 private:
  std::string path_;
  nlohmann::json values_;
};

// A limit that is larger than any tensor, and small enough for sums and for sizes in bytes.
inline constexpr std::uint64_t kElementsMax = std::uint64_t{1} << 48;
// Whether a tensor of this shape has from 1 to kElementsMax elements.
bool has_usable_extents(const std::vector<std::uint64_t>& shape);

// The tensors of a unit, whose names have a common prefix.
class UnitBuilder {
 public:
  UnitBuilder(std::string name, std::string prefix) : prefix_(std::move(prefix)) {
    unit_.name = std::move(name);
  }

  // Here and below, fails with kConfig if a tensor has more than kElementsMax elements.
  void add(const std::string& name, std::vector<std::uint64_t> shape);
  // Adds the matrix of a product, and a bias of `bias` values; 0 = none. The two extents of the
  // matrix may come in either order.
  void add_matrix(const std::string& name, std::uint64_t rows, std::uint64_t columns,
                  std::uint64_t bias = 0);
  // Adds a norm with a weight, and with a bias.
  void add_norm(const std::string& name, std::uint64_t width);
  // Adds the matrices of all experts. A token uses `used` of these experts.
  void add_experts(const std::string& name, std::vector<std::uint64_t> shape, std::uint64_t used);

  // The elements of experts that a token does not use.
  double idle_elements() const { return idle_elements_; }
  UnitSpec take() { return std::move(unit_); }

 private:
  UnitSpec unit_;
  std::string prefix_;
  double idle_elements_ = 0;
};

}  // namespace sluice
