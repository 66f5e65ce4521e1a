// Turns a DeepSpeed file into a config of Sluice, and reports what happened to every key. A key is
// refused if it would change the trained numbers, or needs a feature that Sluice lacks. The message
// has the key's name and place, and says what to write instead. A key that DeepSpeed refuses is
// refused, too. Common mistakes with only one possible meaning are understood and reported.
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

// The values for "auto", and for settings that a file leaves to the program which calls DeepSpeed.
struct DeepspeedValues {
  std::optional<std::uint64_t> batch;          // sequences of a micro-batch
  std::optional<std::uint64_t> micro_batches;  // of a step
  std::optional<double> learning_rate;
  std::vector<double> betas;  // two, or none
  std::optional<double> epsilon;
  std::optional<double> weight_decay;
  std::optional<double> clip_norm;
  std::optional<std::uint64_t> warmup_steps;
  std::optional<std::uint64_t> steps;
  std::string precision;  // empty = bf16, unless the file has a precision
  // Ten times it is the "auto" of stage3_param_persistence_threshold.
  std::optional<std::uint64_t> hidden_size;
  std::string device = "auto";
  std::uint32_t ranks = 1;
  // Messages call an option by its name here, under the key "micro_batches" for --micro-batches. A
  // program that has the values from elsewhere, and its own optimizer, says where.
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
  std::vector<ImportLine> understood;  // keys understood as something else
  std::vector<ImportLine> refused;
  std::vector<std::string> options;  // options that "auto" asks for
};

struct ImportedConfig {
  std::string config;  // JSON, for ConfigDocument
  ImportReport report;
};

// Whether `text` is a DeepSpeed file: it has keys of DeepSpeed and no key that only Sluice has.
// Text that is not Hjson is no DeepSpeed file.
bool is_deepspeed_file(std::string_view text);

// `name` is the name of the text in messages.
// Fails with kConfig if the text is not Hjson. All other errors are listed in the report.
ImportedConfig import_deepspeed(std::string_view text, const std::string& name,
                                const DeepspeedValues& values);

// One message about all keys that are refused.
std::string refusals(const ImportReport& report, const std::string& name);
// The result is a line such as "ds.json is a DeepSpeed file: 12 keys mapped, 5 not needed, 1
// understood, none refused".
std::string summary_of(const ImportReport& report, const std::string& name);

// The whole report, with a line for each key.
std::string describe(const ImportReport& report, const std::string& name);
// The whole report as JSON, with the config.
std::string report_json(const ImportedConfig& imported, const std::string& name);

// Returns the text of the config file `argument`. If `argument` is base64, as DeepSpeed accepts it,
// returns the decoded text.
// Fails with kInput if `argument` is neither.
std::string config_text(const std::string& argument);

}  // namespace sluice
