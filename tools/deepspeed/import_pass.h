// The state of one import: the entries of the DeepSpeed file, the config that has been built so
// far, and the report. deepspeed_import.cc controls the import. Each import_*.cc imports one part
// of the DeepSpeed file.
//
// Thread rule: one thread. The document and the values must outlive the pass.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tools/deepspeed/deepspeed_import.h"
#include "tools/deepspeed/deepspeed_keys.h"
#include "tools/deepspeed/hjson_reader.h"

namespace sluice {

class ImportPass {
 public:
  ImportPass(const HjsonDocument& document, const DeepspeedValues& values)
      : document_(document), values_(values) {}

  struct Entry {
    std::string written;  // the key as written in the file
    OrderedJson value;
    OrderedJson written_value;
    const DeepspeedKey* row = nullptr;
  };

  const DeepspeedValues& values() const { return values_; }
  // Returns the entry of `key`. Returns null if the file has no such key. Also returns null if the
  // value is "auto" and the default replaces this value.
  const Entry* find(const std::string& key) const;
  bool is_auto(const std::string& key) const;
  bool has_section(const std::string& key) const { return sections_.contains(key); }
  // Returns the value of `key` if it is a number. Returns nothing if there is no number, or if the
  // number has been refused.
  std::optional<double> number(const std::string& key) const;
  // Does the same as number(), but also returns a refused number.
  std::optional<double> written_number(const std::string& key) const;
  std::optional<std::uint64_t> integer(const std::string& key) const;
  std::optional<bool> boolean(const std::string& key) const;
  std::optional<std::string> text(const std::string& key) const;
  // Returns the value that --set or an option gives to `key`. Returns null if neither does.
  OrderedJson given(const std::string& key) const;
  std::optional<double> given_number(const std::string& key) const;
  std::optional<std::uint64_t> given_integer(const std::string& key) const;
  // Returns whether the file has `key`. A value from an option does not count.
  bool is_written(const std::string& key) const;
  // Returns DeepSpeed's default of `key`, from the table.
  double default_number(const std::string& key) const;

  // Sets `new_key` in the config to `value`. `value` comes from the file's value of `key`, or from
  // the default of `key`.
  void map(const std::string& key, const std::string& new_key, const OrderedJson& value,
           const std::string& text = "");
  void not_needed(const std::string& key, const std::string& text);
  void understood(const std::string& key, const std::string& text);
  void refuse(const std::string& key, const std::string& text);
  void ask_for(const std::string& option);
  // Refuses `key` because the file and an option give different values.
  void refuse_conflict(const std::string& key, const std::string& in_file,
                       const std::string& option, const std::string& of_option);

  // Adds the members of `object`, and the members of all sections inside `object`. `object` is a
  // section of the file. Each key has a row in the table of keys. The row decides how the pass
  // treats the key.
  void add_members(const OrderedJson& object, const std::string& path, const std::string& written,
                   bool is_strict);
  void set_entry(const std::string& key, const OrderedJson& value);
  // Settles the keys of `section`, whose type is now known. `type` is the type in the file, and
  // `kind` is its name in the table of keys. Keys that this type does not take are refused. Missing
  // keys get the values of options, and an option that this type has no use for is refused. If a
  // program has other names for the options, its values only replace "auto". The reason is that
  // transformers leaves missing keys at DeepSpeed's defaults.
  void settle_section(const std::string& section, const std::string& kind, const std::string& type);
  // Returns the keys of which the report has no line.
  std::vector<std::string> unmentioned() const;

  OrderedJson config = OrderedJson::object();
  ImportReport report;

 private:
  ImportLine line(const std::string& key, const std::string& text) const;
  void add_member(const std::string& key, const std::string& written, const OrderedJson& value,
                  bool is_strict);
  void add_unknown(const std::string& key, const std::string& written, const OrderedJson& value,
                   bool is_strict);
  void add_dotted(const std::string& path, const std::string& written, const std::string& name,
                  const OrderedJson& value, bool is_strict);
  void add_leaf(const DeepspeedKey& row, const std::string& written, const OrderedJson& value,
                bool is_strict);
  void judge_auto(Entry entry);
  void withdraw(const DeepspeedKey& row, const std::string& written);
  void add_given(const DeepspeedKey& row, bool is_taken, const std::string& type);

  const HjsonDocument& document_;
  const DeepspeedValues& values_;
  std::map<std::string, Entry> entries_;  // by the key's name in the table
  std::map<std::string, std::string> sections_;
};

// Each function imports one part of the file.
void import_batch(ImportPass& pass);
void import_zero(ImportPass& pass);
void import_storage(ImportPass& pass);
void import_precision(ImportPass& pass);
void import_optimizer(ImportPass& pass);
void import_scheduler(ImportPass& pass);
// Says for each key that no other function used why this key has no effect.
void import_rest(ImportPass& pass);

// Converts `value` to the type that `row` names. If the conversion fails, returns nothing and
// writes the reason to `why`. If the function converts a value of another type, such as 1 to true,
// the function writes a remark to `note`.
std::optional<OrderedJson> value_of_type(const DeepspeedKey& row, const OrderedJson& value,
                                         std::string& why, std::string& note);
// Returns whether `row` says that `value` is refused.
bool is_refused_value(const DeepspeedKey& row, const OrderedJson& value);
// ASCII letters in lower case.
std::string lower(std::string text);

}  // namespace sluice
