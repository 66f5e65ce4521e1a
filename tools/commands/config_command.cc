#include "tools/commands/config_command.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include "engine/config/config_schema_check.h"
#include "engine/plan/parameter_groups.h"
#include "tools/cli/exit_codes.h"
#include "tools/cli/json_text.h"
#include "tools/cli/output_file.h"
#include "tools/cli/print.h"
#include "tools/commands/config_inputs.h"
#include "tools/deepspeed/config_source.h"
#include "tools/deepspeed/deepspeed_keys.h"
#include "tools/gpt/train/compute_device.h"
#include "tools/gpt/train/train_config.h"

namespace sluice {
namespace {

using nlohmann::ordered_json;

// Whether an option gave one.
bool has_value(const DeepspeedValues& values) {
  return values.batch || values.micro_batches || values.learning_rate || !values.betas.empty() ||
         values.epsilon || values.weight_decay || values.clip_norm || values.warmup_steps ||
         values.steps || !values.precision.empty() || values.ranks != 1;
}

// read_config_source() leaves steps and ranks alone, which train and plan take for any config.
void refuse_steps_and_ranks(const DeepspeedValues& values, const std::string& name) {
  const char* const option = values.steps ? "--steps" : values.ranks != 1 ? "--ranks" : nullptr;
  if (option != nullptr)
    throw Error(
        ErrorCode::kConfig,
        fmt::format("{} is a value for a DeepSpeed file here, and {} is a config of "
                    "Sluice; {}",
                    option, name,
                    values.steps ? fmt::format("give --set run.steps={} instead", *values.steps)
                                 : "leave it out"));
}

ConfigSource source_of(const ConfigShowOptions& options) {
  ConfigSource source = read_config_source(options.file, options.values, options.assignments);
  if (!source.report) refuse_steps_and_ranks(options.values, name_of_source(options.file));
  return source;
}

// docs/config_keys.md writes "optimizer.groups[].tensors" for the key of any entry.
std::string of_first_entry(std::string key) {
  for (std::size_t at = key.find("[]"); at != std::string::npos; at = key.find("[]", at))
    key.replace(at, 2, ".0");
  return key;
}

void explain_own(const std::string& key, const nlohmann::json& schema) {
  say("{}: a key of Sluice\n", key);
  if (schema.contains("default")) {
    say("  default {}\n", schema["default"].dump());
  } else {
    say("  default: chosen by Sluice\n");
  }
  for (const char* bound : {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "enum"}) {
    if (schema.contains(bound)) say("  {} {}\n", bound, schema[bound].dump());
  }
  say("  {}\n", schema.value("description", ""));
}

std::string meaning(const DeepspeedKey& row) {
  switch (row.key_class) {
    case DeepspeedClass::kMap:
      return row.to.empty() ? "a section that is mapped"
                            : fmt::format("goes to {}", fmt::join(row.to, ", "));
    case DeepspeedClass::kDerive: return "not needed: Sluice works it out";
    case DeepspeedClass::kNote: return "not needed: it has no effect on training";
    case DeepspeedClass::kRefuse:
      if (row.refuse == "always") return "refused";
      return row.refuse == "false" ? "refused where it is false" : "refused where it is on";
    case DeepspeedClass::kError: return "refused: no key of DeepSpeed";
    case DeepspeedClass::kForeign: return "no key of DeepSpeed, which ignores it";
    case DeepspeedClass::kAlias: return fmt::format("another name of {}", row.is);
  }
  return "";
}

void explain_deepspeed(const DeepspeedKey& row) {
  say("{}: a key of DeepSpeed\n", row.key);
  say("  {}\n", meaning(row));
  if (!row.fallback.is_null()) say("  DeepSpeed's default {}\n", row.fallback.dump());
  if (!row.option.empty()) say("  \"auto\" takes the value of {}\n", row.option);
  if (!row.why.empty()) say("  {}\n", row.why);
}

// Every key is Sluice's, and there is one.
bool is_own_config(const std::string& text, const std::string& name) {
  try {
    (void)ConfigDocument(text, name);
    return !nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false).empty();
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

int run_config_import(const ConfigImportOptions& options) {
  OutputFiles files;
  OutputFile& output = files.add("--output", options.output);
  files.add_input("the DeepSpeed file", options.file);
  files.check();
  const std::string name = name_of_source(options.file);
  const std::string text = config_text(options.file);
  if (!is_deepspeed_file(text) && is_own_config(text, name))
    throw Error(
        ErrorCode::kConfig,
        fmt::format("{} is a config of Sluice already, which train and plan take as it is", name));
  const ImportedConfig imported = import_deepspeed(text, name, options.values);
  const ImportReport& report = imported.report;
  const bool is_refused = !report.refused.empty();
  if (options.as_json) {
    say_text(report_json(imported, name));
  } else if (output.is_wanted()) {
    say("{}", describe(report, name));
  } else {
    warn("{}", describe(report, name));
  }
  if (is_refused && options.is_lenient) {
    // A config stays wrong where its keys contradict each other: no key of them is refused.
    validate(train_config(ConfigDocument(imported.config, name + " (imported)")).engine);
    warn("sluice: {} refused; --lenient goes on without {}\n", report.refused.size(),
         report.refused.size() == 1 ? "it" : "them");
  }
  if (is_refused && !options.is_lenient) return kExitUsage;
  if (output.is_wanted()) {
    add_config_inputs(files, options.file, ConfigDocument(imported.config, name + " (imported)"));
    files.compare();
    write_whole(output, imported.config + "\n");
  } else if (!options.as_json) {
    say_text(imported.config + "\n");
  }
  return kExitOk;
}

int run_config_check(const ConfigShowOptions& options) {
  const ConfigSource source = source_of(options);
  const TrainConfig config = train_config(source.document);
  validate(config.engine);
  check_gpu_config(config);
  const ModelSpec model = validated(training_model(config, computes_on_host(config)));
  (void)ParameterGroups(config.engine.optimizer, model);  // fails on a pattern without a tensor
  if (source.report) say("{}\n", summary_of(*source.report, name_of_source(options.file)));
  say("{} is a config that sluice train takes\n", name_of_source(options.file));
  return kExitOk;
}

int run_config_show(const ConfigShowOptions& options) {
  const ConfigSource source = source_of(options);
  ordered_json all = ordered_json::object();
  for (const std::string& key : config_keys()) {
    const std::string value = source.document.json_of(key);
    const std::string origin = source.origin_of(key);
    if (options.as_json) {
      all[key] = {{"value", ordered_json::parse(value)}, {"origin", origin}};
    } else {
      say("{:<44} {:<16} {}\n", key, value == "null" ? "chosen by Sluice" : value, origin);
    }
  }
  if (options.as_json) say_text(json_text(all) + "\n");
  return kExitOk;
}

int run_config_rates(const ConfigShowOptions& options) {
  const TrainConfig config = train_config(source_of(options).document);
  const std::uint64_t steps = options.steps == 0 ? config.steps : options.steps;
  for (std::uint64_t step = 0; step < steps && said_failure() == 0; ++step)
    say("{} {}\n", step + 1, learning_rate_at(config, step));
  return kExitOk;
}

int run_config_diff(const ConfigDiffOptions& options) {
  // The values are for the one that is a DeepSpeed file.
  const auto read = [&](const std::string& argument) {
    const bool is_deepspeed = is_deepspeed_file(config_text(argument));
    return read_config_source(argument, is_deepspeed ? options.values : DeepspeedValues{}, {});
  };
  const ConfigSource before = read(options.before);
  const ConfigSource after = read(options.after);
  if (!before.report && !after.report && has_value(options.values))
    throw Error(ErrorCode::kConfig,
                fmt::format("config diff: neither {} nor {} is a DeepSpeed file, so values for "
                            "\"auto\" have no effect; leave those options out",
                            name_of_source(options.before), name_of_source(options.after)));
  std::size_t count = 0;
  for (const std::string& key : config_keys()) {
    const std::string old_value = before.document.json_of(key);
    const std::string new_value = after.document.json_of(key);
    if (old_value == new_value) continue;
    ++count;
    say("{}: {} ({}) -> {} ({})\n", key, old_value, before.origin_of(key), new_value,
        after.origin_of(key));
  }
  say("{} of {} keys differ\n", count, config_keys().size());
  return kExitOk;
}

int run_config_explain(const std::string& key) {
  if (key.empty())
    throw Error(ErrorCode::kConfig,
                "config explain: the key is empty; name one, such as optimizer.beta2");
  const nlohmann::json* own = find_key_schema(of_first_entry(key));
  const DeepspeedKey* row = find_deepspeed_key(key);
  const std::string list = key.substr(0, key.find_last_of(".["));
  const nlohmann::json* around = find_key_schema(of_first_entry(list));
  if (own != nullptr && around != nullptr && around->value("type", "") == "array")
    throw Error(ErrorCode::kConfig,
                fmt::format("config explain: {} is an entry of a list; name the list, {}{}", key,
                            list, own->contains("properties") ? ", or a key in the entry" : ""));
  if (own == nullptr && row == nullptr) {
    const std::string hint = nearest_key_hint(key, "");
    std::string of_deepspeed = deepspeed_key_hint(key);
    if (!of_deepspeed.empty())
      of_deepspeed = (hint.empty() ? "; in DeepSpeed," : " In DeepSpeed,") + of_deepspeed.substr(1);
    throw Error(ErrorCode::kConfig, fmt::format("neither Sluice nor DeepSpeed has a key \"{}\"{}{}",
                                                key, hint, of_deepspeed));
  }
  if (own != nullptr) explain_own(key, *own);
  if (row != nullptr) explain_deepspeed(*row);
  return kExitOk;
}

}  // namespace sluice
