// A config file that has been read. Config files are JSON with comments. Every key and value is
// checked against the schema (configs/sluice.schema.json, embedded in the library). The object
// keeps the place of each key, so that later error messages can name the file, the line and the
// column. After construction, only set() changes the object. After the last call of set(), any
// thread may call the other functions.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/export.h>

namespace sluice {

class SLUICE_EXPORT ConfigDocument {
 public:
  // In messages, `name` is the name of the text.
  // Fails with kConfig if the JSON does not parse, a key is unknown, or a value has the wrong type
  // or is out of range. The message has the form "NAME:LINE:COLUMN: ...". For an unknown key, the
  // message names the nearest known key.
  ConfigDocument(std::string_view text, std::string name);
  // Fails with kInput if the file cannot be read. Also fails in the same cases as the constructor.
  static ConfigDocument from_file(const std::string& path);

  // Reads the text of a file in the same way as from_file().
  // Fails with kInput if the file cannot be read.
  static std::string text_of_file(const std::string& path);

  ConfigDocument(ConfigDocument&&) noexcept;
  ConfigDocument& operator=(ConfigDocument&&) noexcept;
  ~ConfigDocument();

  // Applies "a.b=VALUE" from a command line. A VALUE that is not JSON is taken as a string.
  // Fails with kConfig in the same cases as the constructor. The message names the assignment.
  void set(std::string_view assignment);

  // Returns the value of a key such as "optimizer.beta1". If the document does not set the key, the
  // result is the key's default in the schema.
  // Requires: the schema has the key, and the key's type is the function's type. The schema also
  // has a default for the key, unless the function's name begins with "find_".
  double number(std::string_view key) const;
  std::uint64_t integer(std::string_view key) const;
  bool boolean(std::string_view key) const;
  std::string string(std::string_view key) const;
  std::vector<std::string> strings(std::string_view key) const;
  std::vector<double> numbers(std::string_view key) const;
  // The number of entries of a list. Entry i of the list "a.b" has the keys "a.b.i.KEY".
  std::size_t entry_count(std::string_view key) const;
  // The result is empty if neither the file nor the schema gives a value.
  std::optional<double> find_number(std::string_view key) const;
  std::optional<std::uint64_t> find_integer(std::string_view key) const;
  // The result of find_string() is also empty if the value has another type.
  std::optional<std::string> find_string(std::string_view key) const;
  // Returns the value as a size in bytes. The result is empty if the value is "auto".
  std::optional<std::uint64_t> size_bytes(std::string_view key) const;

  // Returns the value of any key as JSON. The result is "null" if neither the file nor the schema
  // gives a value.
  std::string json_of(std::string_view key) const;
  // The origin of the value: "NAME:LINE:COLUMN", "--set KEY=VALUE", or "default".
  std::string origin_of(std::string_view key) const;

  // Throws an Error with the code kConfig. The error's text is the place of `key`, and then
  // `message`.
  [[noreturn]] void fail(std::string_view key, const std::string& message) const;

 private:
  struct Content;
  std::unique_ptr<Content> content_;
};

}  // namespace sluice
