// A config file as read: JSON with comments. Every key and value is checked against the schema
// (configs/sluice.schema.json, embedded in the library). The place of each key is kept, so that
// later errors can name file, line and column. Only set() changes an object after construction. Any
// thread may call the other functions once no set() will follow.
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
  // `name` stands for the text in messages.
  // Fails with kConfig and "NAME:LINE:COLUMN: ..." if the JSON does not parse, a key is unknown, or
  // a value has the wrong type or is out of range. For an unknown key, the message names the
  // nearest known key.
  ConfigDocument(std::string_view text, std::string name);
  // Fails with kInput if the file cannot be read, and otherwise as the constructor does.
  static ConfigDocument from_file(const std::string& path);

  // The text of a file, as from_file() reads it.
  // Fails with kInput if the file cannot be read.
  static std::string text_of_file(const std::string& path);

  ConfigDocument(ConfigDocument&&) noexcept;
  ConfigDocument& operator=(ConfigDocument&&) noexcept;
  ~ConfigDocument();

  // Applies "a.b=VALUE" from a command line. A VALUE that is not JSON is taken as a string.
  // Fails with kConfig in the same cases as the constructor. The message names the assignment.
  void set(std::string_view assignment);

  // The value of a key such as "optimizer.beta1", or its default in the schema.
  // Requires: the schema has the key with the function's type, and has a default unless a find_
  // function is called.
  double number(std::string_view key) const;
  std::uint64_t integer(std::string_view key) const;
  bool boolean(std::string_view key) const;
  std::string string(std::string_view key) const;
  std::vector<std::string> strings(std::string_view key) const;
  std::vector<double> numbers(std::string_view key) const;
  // The number of entries of a list. The keys of entry i of "a.b" are "a.b.i.KEY".
  std::size_t entry_count(std::string_view key) const;
  // The result is empty if neither the file nor the schema gives a value.
  std::optional<double> find_number(std::string_view key) const;
  std::optional<std::uint64_t> find_integer(std::string_view key) const;
  // The result is empty if the value has another type.
  std::optional<std::string> find_string(std::string_view key) const;
  // The value as a size; empty for "auto".
  std::optional<std::uint64_t> size_bytes(std::string_view key) const;

  // The value of any key as JSON; "null" if neither the file nor the schema gives a value.
  std::string json_of(std::string_view key) const;
  // The origin of the value: "NAME:LINE:COLUMN", "--set KEY=VALUE", or "default".
  std::string origin_of(std::string_view key) const;

  // Throws Error{kConfig} with the place of `key` in front of `message`.
  [[noreturn]] void fail(std::string_view key, const std::string& message) const;

 private:
  struct Content;
  std::unique_ptr<Content> content_;
};

}  // namespace sluice
