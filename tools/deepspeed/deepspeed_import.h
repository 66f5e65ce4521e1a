// Turns a DeepSpeed file into a config of Sluice, and says for every key what became of it. A key
// that would train other numbers, or needs what Sluice lacks, is refused by name and place, with
// what to write instead. A key that DeepSpeed refuses is refused, too. Mistakes that are often
// copied and can mean only one thing are understood and reported.
//
// Thread rule: any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

// Values for "auto", and those that a file leaves to the program which calls DeepSpeed.
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
  std::string precision;  // empty = bf16 where the file leaves it open
  std::string device = "auto";
  std::uint32_t ranks = 1;
};

struct ImportLine {
  std::string place = {};      // NAME:LINE:COLUMN, or NAME
  std::string key = {};        // as the file has it; empty = of the whole file
  std::string value = {};      // as JSON
  std::string new_key = {};    // of a mapped one
  std::string new_value = {};  // as JSON
  std::string text = {};
};

struct ImportReport {
  std::vector<ImportLine> mapped;
  std::vector<ImportLine> not_needed;
  std::vector<ImportLine> understood;  // meant otherwise than written
  std::vector<ImportLine> refused;
  std::vector<std::string> options;  // that "auto" asks for
};

struct ImportedConfig {
  std::string config;  // JSON, for ConfigDocument
  ImportReport report;
};

// Whether `text` is a DeepSpeed file: its keys are DeepSpeed's and none is Sluice's alone. Text
// that is no Hjson is none.
bool is_deepspeed_file(std::string_view text);

// `name` is what messages call the text.
// Fails with: kConfig for text that is no Hjson. Whatever else is wrong stands in the report.
ImportedConfig import_deepspeed(std::string_view text, const std::string& name,
                                const DeepspeedValues& values);

// All that is refused, in one message.
std::string refusals(const ImportReport& report, const std::string& name);
// "ds.json is a DeepSpeed file: 12 keys mapped, 5 not needed, 1 understood, none refused".
std::string summary_of(const ImportReport& report, const std::string& name);

// The whole report, a line for each key.
std::string describe(const ImportReport& report, const std::string& name);
// The same as JSON, with the config.
std::string report_json(const ImportedConfig& imported, const std::string& name);

// The text of a config file, or the text that `argument` itself is in base64, as DeepSpeed takes
// it.
// Fails with: kInput when it is neither.
std::string config_text(const std::string& argument);

}  // namespace sluice
