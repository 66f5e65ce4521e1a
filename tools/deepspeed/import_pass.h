// One import under way: the file's entries as the table of keys knows them, the config that grows,
// and the report. deepspeed_import.cc drives it; import_*.cc have a part of the file each.
//
// Thread rule: one thread. The document and the values must outlive it.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "tools/deepspeed/deepspeed_import.h"
#include "tools/deepspeed/deepspeed_keys.h"
#include "tools/deepspeed/hjson_reader.h"

namespace sluice {

class ImportPass {
 public:
  ImportPass(const HjsonDocument& document, const DeepspeedValues& values)
      : document_(document), values_(values) {}

  struct Entry {
    std::string written;  // the key as the file has it
    OrderedJson value;
    OrderedJson written_value;
    const DeepspeedKey* row = nullptr;
  };

  const DeepspeedValues& values() const { return values_; }
  // Null where the file has no such key, or "auto" for the default.
  const Entry* find(const std::string& key) const;
  bool is_auto(const std::string& key) const;
  bool has_section(const std::string& key) const { return sections_.contains(key); }
  // Nothing where there is none, or one that has been refused.
  std::optional<double> number(const std::string& key) const;
  // Also of one that has been refused.
  std::optional<double> written_number(const std::string& key) const;
  std::optional<std::uint64_t> integer(const std::string& key) const;
  std::optional<bool> boolean(const std::string& key) const;
  std::optional<std::string> text(const std::string& key) const;
  // DeepSpeed's default of `key`, from the table.
  double default_number(const std::string& key) const;

  // `value` goes to `new_key`, for `key` of the file or for its default.
  void map(const std::string& key, const std::string& new_key, const OrderedJson& value,
           const std::string& text = "");
  void not_needed(const std::string& key, const std::string& text);
  void understood(const std::string& key, const std::string& text);
  void refuse(const std::string& key, const std::string& text);
  void ask_for(const std::string& option);

  // Adds the file's entries, from outside to inside, each judged by its row.
  void add_members(const OrderedJson& object, const std::string& path, const std::string& written,
                   bool is_strict);
  void set_entry(const std::string& key, const OrderedJson& value);

  OrderedJson config = OrderedJson::object();
  ImportReport report;

 private:
  ImportLine line(const std::string& key, const std::string& text) const;
  void add_member(const std::string& key, const std::string& written, const OrderedJson& value,
                  bool is_strict);
  void add_unknown(const std::string& key, const std::string& written, const OrderedJson& value,
                   bool is_strict);
  void add_leaf(const DeepspeedKey& row, const std::string& written, const OrderedJson& value,
                bool is_strict);
  void judge_auto(Entry entry);

  const HjsonDocument& document_;
  const DeepspeedValues& values_;
  std::map<std::string, Entry> entries_;  // by the table's key
  std::map<std::string, std::string> sections_;
};

// The parts of a file.
void import_batch(ImportPass& pass);
void import_zero(ImportPass& pass);
void import_storage(ImportPass& pass);
void import_precision(ImportPass& pass);
void import_optimizer(ImportPass& pass);
void import_scheduler(ImportPass& pass);

// `value` as the row's type, or nothing and what is wrong with it in `why`; `note` says what was
// meant otherwise than written.
std::optional<OrderedJson> value_of_type(const DeepspeedKey& row, const OrderedJson& value,
                                         std::string& why, std::string& note);
// Whether the row refuses `value`.
bool is_refused_value(const DeepspeedKey& row, const OrderedJson& value);

}  // namespace sluice
