// Turns a DeepSpeed file into a config of Sluice, and reports what happened to every key. The
// importer refuses a key if the key would change the result of training. The importer also refuses
// a key that needs a feature which Sluice lacks. The message contains the key's name and place, and
// says what to write instead. The importer also refuses all keys that DeepSpeed refuses. If a
// common mistake has only one possible meaning, the importer reports the mistake and continues with
// this meaning.
//
// Thread rule: any thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

// The values that replace "auto" in the file. Some of these values replace settings that a training
// program usually passes to DeepSpeed.
struct DeepspeedValues {
  std::optional<std::uint64_t> batch;          // sequences of a micro-batch
  std::optional<std::uint64_t> micro_batches;  // micro-batches of a step
  std::optional<double> learning_rate;
  std::vector<double> betas;  // two, or none
  std::optional<double> epsilon;
  std::optional<double> weight_decay;
  std::optional<double> clip_norm;
  std::optional<std::uint64_t> warmup_steps;
  std::optional<std::uint64_t> steps;
  // How to give the steps. Some commands have no --steps, or have one with another meaning.
  std::string steps_option = "--steps";
  std::string precision;  // empty = bf16, unless the file has a precision
  // If stage3_param_persistence_threshold is "auto", the importer sets this threshold to ten times
  // the hidden size.
  std::optional<std::uint64_t> hidden_size;
  std::string device = "auto";
  std::uint32_t ranks = 1;
  // The values of --set as JSON, by keys of Sluice. They replace "auto" and missing values, as
  // options do. They also replace numbers of the optimizer and the schedule, because other values
  // of the config follow from these numbers.
  std::map<std::string, std::string> assigned;
  // The names that messages give to options. For example, the key of --micro-batches is
  // "micro_batches". A program may take values from sources that are not options. Such a program
  // stores the names of these sources in `names`.
  std::map<std::string, std::string> names;
};

struct ImportLine {
  std::string place = {};      // "NAME:LINE:COLUMN", or "NAME"
  std::string key = {};        // as in the file; empty = the line is about the whole file
  std::string value = {};      // as JSON
  std::string new_key = {};    // of a mapped key
  std::string new_value = {};  // as JSON
  std::string text = {};
};

struct ImportReport {
  std::vector<ImportLine> mapped;
  std::vector<ImportLine> not_needed;
  std::vector<ImportLine> understood;  // keys with a mistake whose meaning is clear
  std::vector<ImportLine> refused;
  std::vector<std::string> options;  // options that the user should give for missing values
};

struct ImportedConfig {
  std::string config;  // JSON, for ConfigDocument
  ImportReport report;
};

// Whether `text` is a DeepSpeed file. A DeepSpeed file has keys of DeepSpeed, and has no key that
// exists only in Sluice. If the text is not Hjson, only the keys before the first error count.
bool is_deepspeed_file(std::string_view text);

// `name` is the name that messages give to the text. The report has a line for every key of the
// file. The report lists all errors except bad Hjson.
// Fails with kConfig if the text is not Hjson.
ImportedConfig import_deepspeed(std::string_view text, const std::string& name,
                                const DeepspeedValues& values);

// Returns one message about all keys that are refused.
std::string refusals(const ImportReport& report, const std::string& name);
// Returns a line such as "ds.json is a DeepSpeed file: 12 keys mapped, 5 not needed, 1 understood,
// none refused".
std::string summary_of(const ImportReport& report, const std::string& name);

// Returns the report as text, with one line for each key.
std::string describe(const ImportReport& report, const std::string& name);
// Returns the report and the imported config as JSON.
std::string report_json(const ImportedConfig& imported, const std::string& name);

// Returns the text of the config file `argument`. If `argument` is a config in base64, the result
// is the decoded text.
// Fails with kInput if `argument` is neither a file nor base64.
std::string config_text(const std::string& argument);

}  // namespace sluice
