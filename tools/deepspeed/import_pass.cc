#include "tools/deepspeed/import_pass.h"

#include <algorithm>
#include <set>

#include <fmt/format.h>

#include <sluice/error.h>

namespace sluice {
namespace {

constexpr const char* kMissing = "as if it were missing";

std::string joined(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

bool is_comment_key(const std::string& name) {
  return name.starts_with('_') || name.starts_with("//") || name.starts_with("comment");
}

// The value that --set gives to the key of Sluice that takes the value of `row`.
OrderedJson assigned_value(const DeepspeedValues& values, const DeepspeedKey& row) {
  const auto value_of = [&values](const std::string& key) {
    const auto found = values.assigned.find(key);
    return found == values.assigned.end() ? OrderedJson() : OrderedJson::parse(found->second);
  };
  // The batch of all ranks is a product, and the two keys of the precision share one of Sluice.
  if (row.option.empty() || row.option == "--precision" || row.key == "train_batch_size") return {};
  if (row.type != "pair") return value_of(row.to.front());
  const OrderedJson first = value_of(row.to[0]);
  const OrderedJson second = value_of(row.to[1]);
  if (first.is_null() || second.is_null()) return {};
  return OrderedJson::array({first, second});
}

// The value that an option gives to the key whose "auto" asks for it.
OrderedJson value_of_option(const DeepspeedValues& values, const DeepspeedKey& row) {
  const auto given = [](const auto& value) { return value ? OrderedJson(*value) : OrderedJson(); };
  if (row.key == "train_micro_batch_size_per_gpu") return given(values.batch);
  if (row.option == "--micro-batches") return given(values.micro_batches);
  if (row.option == "--lr") return given(values.learning_rate);
  if (row.option == "--betas")
    return values.betas.empty() ? OrderedJson() : OrderedJson(values.betas);
  if (row.option == "--eps") return given(values.epsilon);
  if (row.option == "--weight-decay") return given(values.weight_decay);
  if (row.option == "--clip-norm") return given(values.clip_norm);
  if (row.option == "--warmup-steps") return given(values.warmup_steps);
  if (row.option == "--steps") return given(values.steps);
  if (row.key == "zero_optimization.stage3_param_persistence_threshold" && values.hidden_size)
    return 10 * *values.hidden_size;
  return {};
}

// How to give the value that `row` asks for.
const std::string& asked_option(const DeepspeedValues& values, const DeepspeedKey& row) {
  return row.option == "--steps" ? values.steps_option : row.option;
}

}  // namespace

const ImportPass::Entry* ImportPass::find(const std::string& key) const {
  const auto entry = entries_.find(key);
  return entry == entries_.end() || entry->second.value.is_null() ? nullptr : &entry->second;
}

bool ImportPass::is_auto(const std::string& key) const {
  const auto entry = entries_.find(key);
  return entry != entries_.end() && entry->second.written_value == "auto";
}

std::optional<double> ImportPass::number(const std::string& key) const {
  const Entry* entry = find(key);
  if (entry == nullptr || !entry->value.is_number()) return std::nullopt;
  return entry->value.get<double>();
}

std::optional<double> ImportPass::written_number(const std::string& key) const {
  const auto entry = entries_.find(key);
  if (entry == entries_.end() || !entry->second.written_value.is_number()) return std::nullopt;
  return entry->second.written_value.get<double>();
}

std::optional<std::uint64_t> ImportPass::integer(const std::string& key) const {
  const Entry* entry = find(key);
  if (entry == nullptr || !entry->value.is_number_integer() || entry->value < 0)
    return std::nullopt;
  return entry->value.get<std::uint64_t>();
}

std::optional<bool> ImportPass::boolean(const std::string& key) const {
  const Entry* entry = find(key);
  if (entry == nullptr || !entry->value.is_boolean()) return std::nullopt;
  return entry->value.get<bool>();
}

std::optional<std::string> ImportPass::text(const std::string& key) const {
  const Entry* entry = find(key);
  if (entry == nullptr || !entry->value.is_string()) return std::nullopt;
  return entry->value.get<std::string>();
}

OrderedJson ImportPass::given(const std::string& key) const {
  const DeepspeedKey* row = find_deepspeed_key(key);
  SLUICE_CHECK(row != nullptr, "only keys of the table have options");
  OrderedJson assigned = assigned_value(values_, *row);
  return assigned.is_null() ? value_of_option(values_, *row) : assigned;
}

std::optional<double> ImportPass::given_number(const std::string& key) const {
  const OrderedJson value = given(key);
  if (!value.is_number()) return std::nullopt;
  return value.get<double>();
}

std::optional<std::uint64_t> ImportPass::given_integer(const std::string& key) const {
  const OrderedJson value = given(key);
  if (!value.is_number()) return std::nullopt;
  return value.get<std::uint64_t>();
}

bool ImportPass::is_written(const std::string& key) const {
  const auto entry = entries_.find(key);
  return entry != entries_.end() && !entry->second.written.starts_with("--");
}

double ImportPass::default_number(const std::string& key) const {
  const DeepspeedKey* row = find_deepspeed_key(key);
  SLUICE_CHECK(row != nullptr && row->fallback.is_number(), "a key without a default number");
  return row->fallback.get<double>();
}

ImportLine ImportPass::line(const std::string& key, const std::string& text) const {
  const auto entry = entries_.find(key);
  if (entry == entries_.end()) return {.place = document_.place_of(key), .key = key, .text = text};
  return {.place = document_.place_of(entry->second.written),
          .key = entry->second.written,
          .value = entry->second.written_value.dump(),
          .text = text};
}

void ImportPass::map(const std::string& key, const std::string& new_key, const OrderedJson& value,
                     const std::string& text) {
  std::string pointer = "/" + new_key;
  std::replace(pointer.begin(), pointer.end(), '.', '/');
  config[OrderedJson::json_pointer(pointer)] = value;
  ImportLine mapped = line(key, text);
  mapped.new_key = new_key;
  mapped.new_value = value.dump();
  report.mapped.push_back(mapped);
}

void ImportPass::not_needed(const std::string& key, const std::string& text) {
  report.not_needed.push_back(line(key, text));
}

void ImportPass::understood(const std::string& key, const std::string& text) {
  report.understood.push_back(line(key, text));
}

void ImportPass::refuse(const std::string& key, const std::string& text) {
  report.refused.push_back(line(key, text));
}

void ImportPass::ask_for(const std::string& option) {
  if (std::find(report.options.begin(), report.options.end(), option) == report.options.end())
    report.options.push_back(option);
}

void ImportPass::refuse_conflict(const std::string& key, const std::string& in_file,
                                 const std::string& option, const std::string& of_option) {
  std::string name = option.substr(2);
  std::replace(name.begin(), name.end(), '-', '_');
  const auto given = values_.names.find(name);
  refuse(key, given == values_.names.end()
                  ? fmt::format("the file says {}, but {} says {}: leave one of them out", in_file,
                                option, of_option)
                  : fmt::format("the file says {}, but {} is {}: write \"auto\" in the file, or "
                                "the same value in both",
                                in_file, given->second, of_option));
}

void ImportPass::set_entry(const std::string& key, const OrderedJson& value) {
  entries_[key].value = value;
  if (entries_[key].written.empty()) entries_[key].written = key;
}

void ImportPass::add_members(const OrderedJson& object, const std::string& path,
                             const std::string& written, bool is_strict) {
  for (const auto& [name, value] : object.items()) {
    if (name.find('.') == std::string::npos) {
      add_member(joined(path, name), joined(written, name), value, is_strict);
    } else {
      add_dotted(path, joined(written, name), name, value, is_strict);
    }
  }
}

void ImportPass::add_member(const std::string& key, const std::string& written,
                            const OrderedJson& value, bool is_strict) {
  const DeepspeedKey* row = find_deepspeed_key(key);
  if (row == nullptr) return add_unknown(key, written, value, is_strict);
  if (row->key_class == DeepspeedClass::kAlias) {
    if (row->is.rfind("stage3_", row->is.rfind('.') + 1) == std::string::npos)
      report.understood.push_back({.place = document_.place_of(written),
                                   .key = written,
                                   .text = fmt::format("it means \"{}\": {}", row->is, row->why)});
    return add_member(row->is, written, value, is_strict);
  }
  if (row->type != "section") return add_leaf(*row, written, value, is_strict);
  if (value.is_null()) {
    report.not_needed.push_back(
        {.place = document_.place_of(written), .key = written, .value = "null", .text = kMissing});
    return;
  }
  sections_[key] = written;
  if (key == "zero_optimization" && value.is_boolean()) {  // the form of DeepSpeed's first years
    add_leaf(*find_deepspeed_key("zero_optimization.stage"), written, value == true ? 1 : 0, true);
    return understood("zero_optimization.stage", "the old form of a stage: true is 1, false is 0");
  }
  if (!value.is_object()) {
    entries_[key] = {.written = written, .value = {}, .written_value = value, .row = row};
    return refuse(key, fmt::format("it is {}, but must be an object", value.dump()));
  }
  add_members(value, key, written, row->strict);
}

void ImportPass::add_unknown(const std::string& key, const std::string& written,
                             const OrderedJson& value, bool is_strict) {
  entries_[key] = {.written = written, .value = {}, .written_value = value, .row = nullptr};
  const std::string hint = deepspeed_key_hint(key);
  if (is_strict) return refuse(key, "DeepSpeed refuses it, too: no such key" + hint);
  if (is_comment_key(key.substr(key.rfind('.') + 1))) return not_needed(key, "a comment");
  refuse(key, "DeepSpeed has no such key and ignores it" + (hint.empty() ? "; remove it" : hint));
}

// A dot inside of a name would look like a section. The entry's key has quotes, and so is no other
// key of the file.
void ImportPass::add_dotted(const std::string& path, const std::string& written,
                            const std::string& name, const OrderedJson& value, bool is_strict) {
  const std::string key = fmt::format("{}\"{}\"", path, name);
  entries_[key] = {.written = written, .value = {}, .written_value = value, .row = nullptr};
  if (is_comment_key(name) && !is_strict) return not_needed(key, "a comment");
  std::string where = "remove it";
  if (find_deepspeed_key(joined(path, name)) != nullptr) {
    std::string pointer = "/" + name;
    std::replace(pointer.begin(), pointer.end(), '.', '/');
    OrderedJson nested;
    nested[OrderedJson::json_pointer(pointer)] = value;
    where = "write " + nested.dump();
  }
  refuse(key, fmt::format("DeepSpeed {}, since a name with a dot is no section; {}",
                          is_strict ? "refuses it, too" : "ignores it", where));
}

void ImportPass::add_leaf(const DeepspeedKey& row, const std::string& written,
                          const OrderedJson& value, bool is_strict) {
  if (find(row.key) != nullptr) {
    report.refused.push_back({.place = document_.place_of(written),
                              .key = written,
                              .value = value.dump(),
                              .text = fmt::format("\"{}\" says the same; remove one of them",
                                                  entries_[row.key].written)});
    return;
  }
  Entry& entry = entries_[row.key];
  entry = {.written = written, .value = value, .written_value = value, .row = &row};
  const bool may_refuse =
      row.key_class == DeepspeedClass::kRefuse || row.key_class == DeepspeedClass::kError;
  if (row.key_class == DeepspeedClass::kForeign) return understood(row.key, row.why);
  if (may_refuse && is_refused_value(row, value)) {
    entry.value = {};
    return refuse(row.key, row.why);
  }
  if (value.is_null() || (row.type == "path" && value == "none")) {
    entry.value = {};
    return not_needed(row.key, kMissing);
  }
  if (value == "auto") return judge_auto(entry);
  std::string why, note;
  const std::optional<OrderedJson> typed = value_of_type(row, value, why, note);
  entry.value = typed.value_or(OrderedJson());
  const bool is_mapped = row.key_class == DeepspeedClass::kMap;
  // It is unknown what a value of another type would turn on.
  if (!typed && (is_strict || is_mapped || may_refuse)) return refuse(row.key, why);
  if (!note.empty()) understood(row.key, note);
  if (!is_mapped) return not_needed(row.key, may_refuse ? "it is off" : row.why);
  const OrderedJson option = value_of_option(values_, row);
  if (!option.is_null() && !row.option.empty() && option != *typed)
    refuse_conflict(row.key, typed->dump(), row.option, option.dump());
  const OrderedJson assigned = assigned_value(values_, row);
  // The file's other keys of the batch and the schedule are checked against its own numbers.
  if (!assigned.is_null() && row.to.front().starts_with("optimizer.")) entry.value = assigned;
}

void ImportPass::judge_auto(Entry entry) {
  const DeepspeedKey& row = *entry.row;
  entries_[row.key].value = given(row.key);
  if (row.option == "--precision" || row.key == "train_batch_size") return;
  if (!entries_[row.key].value.is_null()) return;
  if (row.option.empty())
    return row.key_class == DeepspeedClass::kMap
               ? understood(row.key, row.key == "scheduler.params.warmup_max_lr"
                                         ? "the optimizer's learning rate"
                                     : row.chosen ? "chosen by Sluice"
                                     : row.fallback.is_null()
                                         ? kMissing
                                         : "DeepSpeed's default, " + row.fallback.dump())
               : not_needed(row.key, row.why);
  const std::string& option = asked_option(values_, row);
  ask_for(option);
  refuse(row.key, fmt::format("Sluice has no value for \"auto\": give {}", option));
}

void ImportPass::settle_section(const std::string& section, const std::string& kind,
                                const std::string& type) {
  for (const DeepspeedKey& row : deepspeed_keys()) {
    if (!row.key.starts_with(section)) continue;
    const bool is_taken = row.of.empty() || std::ranges::find(row.of, kind) != row.of.end();
    const auto entry = entries_.find(row.key);
    if (entry == entries_.end()) {
      add_given(row, is_taken, type);
    } else if (!is_taken) {
      entry->second.value = {};
      withdraw(row, entry->second.written);
      refuse(row.key,
             fmt::format("{} takes no such value, and DeepSpeed raises for it; remove it", type));
    }
  }
}

// Another value, or an option that gives one, would not help where no value is taken.
void ImportPass::withdraw(const DeepspeedKey& row, const std::string& written) {
  std::erase_if(report.refused, [&](const ImportLine& line) { return line.key == written; });
  std::erase(report.options, asked_option(values_, row));
}

void ImportPass::add_given(const DeepspeedKey& row, bool is_taken, const std::string& type) {
  if (!values_.names.empty() || row.option.empty()) return;
  const OrderedJson value = given(row.key);
  if (value.is_null()) return;
  const bool is_assigned = !assigned_value(values_, row).is_null();
  if (is_taken) {
    entries_[row.key] = {.written = is_assigned ? "--set" : row.option,
                         .value = value,
                         .written_value = value,
                         .row = &row};
  } else if (!is_assigned && row.option != "--steps") {  // those are the run's, too
    report.refused.push_back(
        {.key = row.option,
         .value = value.dump(),
         .text = fmt::format("the file's {} takes no such value; leave the option out", type)});
  }
}

std::vector<std::string> ImportPass::unmentioned() const {
  std::set<std::string> mentioned;
  for (const auto* lines :
       {&report.mapped, &report.not_needed, &report.understood, &report.refused})
    for (const ImportLine& line : *lines) mentioned.insert(line.key);
  std::vector<std::string> keys;
  for (const auto& [key, entry] : entries_)
    if (!mentioned.contains(entry.written)) keys.push_back(key);
  return keys;
}

}  // namespace sluice
